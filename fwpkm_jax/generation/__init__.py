"""Text generation: prefill and decoding; the state is an argument and a result."""

from fwpkm_jax.generation.continuous_batching import ContinuousBatch, join, leave, open_batch, step
from fwpkm_jax.generation.generate import generate
from fwpkm_jax.generation.sampling import Sampling
from fwpkm_jax.generation.state import GenerationOutput, GenerationState, grow, init_generation

__all__ = [
    "ContinuousBatch",
    "GenerationOutput",
    "GenerationState",
    "Sampling",
    "generate",
    "grow",
    "init_generation",
    "join",
    "leave",
    "open_batch",
    "step",
]
