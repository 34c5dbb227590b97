"""Fast-weight memories for language models in JAX."""

__version__ = "0.1.0"
