"""What a memory's slots held while an answer was given, and who wrote it there."""

from fwpkm_jax.evaluation.slot_trace.trace import TRACE, TraceConfig

__all__ = ["TRACE", "TraceConfig"]
