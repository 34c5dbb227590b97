"""Training runs: training, loading, evaluation, and text from a run's model."""

from fwpkm_jax.run.load import Run, load_run, text_tokenizer

__all__ = ["Run", "load_run", "text_tokenizer"]
