"""The tasks of lm-evaluation-harness (extra `lm-eval`), read by this package's models.

References: Gao et al., "The language model evaluation harness", doi:10.5281/zenodo.10256836.
"""
