"""Figures of the paper that are computed, and compared, without a model of its size."""
