"""How evaluations pass tokens through a model."""
