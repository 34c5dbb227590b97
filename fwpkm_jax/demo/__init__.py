"""The weights, configuration and card of the model that `fwpkm demo` runs."""
