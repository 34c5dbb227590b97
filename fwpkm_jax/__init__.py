"""Fast-weight memories for language models in JAX."""
