"""A training run, opened: its configuration and weights, its evaluation, text from its model."""

from fwpkm_jax.run.load import Run, load_run, text_tokenizer

__all__ = ["Run", "load_run", "text_tokenizer"]
