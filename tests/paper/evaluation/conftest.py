"""The tiny model of the tests of evaluations."""

from tests.evaluation.conftest import memory, model

__all__ = ["memory", "model"]
