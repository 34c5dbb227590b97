"""Training runs: training, loading, evaluation, and text from a run's model."""

from fwpkm_jax.run.load import Run, WhichWeights, load_run, text_tokenizer

__all__ = ["Run", "WhichWeights", "load_run", "text_tokenizer"]
