"""Named shapes of the gated delta rule.

Kernels and reference compute the same sums in different orders, in float32. On the GPU each operand
is split in two bfloat16 halves, which gives 16 bits of mantissa. They agree to about 1e-6 of a
tensor's norm on a TPU and 1e-5 on a GPU; the tolerances of the tests are a few times larger. With
bfloat16 arguments both round operands to 8 bits; they agree to about 7e-3.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fwpkm_jax.core.numerics import l2_normalize
from pallas_kernels.dispatch import LIBRARIES, Implementation
from pallas_kernels.gated_delta.api import chunk_gated_delta_rule
from pallas_kernels.spec import LIBRARY_RATIOS, Comparison, Spec


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec(Spec):
    """Sizes of one call, and how strongly it forgets and writes."""

    batch: int = 1
    length: int
    heads: int = 1
    key: int = 64
    value: int = 64
    decay: float = 0.1
    """Mean of `-log_decay`; its distribution has a long tail."""
    largest_beta: float = 1.0
    """Write strengths are uniform from 0 to this; with 2 a write reflects the value at the key."""
    documents: int | None = None
    """Documents of equal length in each sequence, the first of which goes on with the memory that
    is given; None: there are no starts."""


SPECS = (
    GatedDeltaSpec(name="one_token", length=1),
    GatedDeltaSpec(name="63_tokens", length=63, heads=2),
    GatedDeltaSpec(name="100_tokens", length=100),
    GatedDeltaSpec(name="strong_decay", length=130, decay=20.0),
    GatedDeltaSpec(name="strong_writes", length=100, decay=0.001, largest_beta=2.0),
    GatedDeltaSpec(name="wide_keys", length=65, key=128, value=64),
    GatedDeltaSpec(name="wide_values", length=65, key=64, value=256),
    GatedDeltaSpec(name="six_heads", length=65, heads=6),
    GatedDeltaSpec(name="two_wide", length=65, heads=2, key=128, value=128),
    GatedDeltaSpec(name="two_wide_values", length=65, heads=2, key=64, value=128),
    GatedDeltaSpec(name="narrow", batch=2, length=20, heads=3, key=8, value=5),
    GatedDeltaSpec(name="five_chunks", length=300, heads=2, small=False),
    GatedDeltaSpec(name="paper_widths", length=256, heads=8, small=False, compiled=True),
    GatedDeltaSpec(
        name="wide", batch=2, length=256, heads=4, key=128, value=128, small=False, compiled=True
    ),
    GatedDeltaSpec(
        name="widest", length=256, heads=3, key=128, value=256, small=False, compiled=True
    ),
    GatedDeltaSpec(
        name="widest_block", length=256, heads=8, key=128, value=256, small=False, compiled=True
    ),
    GatedDeltaSpec(
        name="documents", length=300, heads=2, key=128, value=128, documents=3, small=False
    ),
    GatedDeltaSpec(name="paper", batch=8, length=4096, heads=8, small=False),
    GatedDeltaSpec(
        name="paper_wide", batch=8, length=4096, heads=16, key=128, value=128, small=False
    ),
    GatedDeltaSpec(name="long", length=32768, heads=8, small=False),
)


def sample(spec: GatedDeltaSpec, dtype: DTypeLike) -> dict[str, jax.Array]:
    """Random arguments, with keys of unit length; queries, keys and values have `dtype`."""
    rngs = iter(jax.random.split(jax.random.key(spec.length), 6))
    tokens = (spec.batch, spec.length, spec.heads)

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(rngs), shape, jnp.float32)

    # The cube of an exponential has mean 6: most tokens decay little, a few decay everything.
    forgetting = jax.random.exponential(next(rngs), tokens, jnp.float32) ** 3
    found = {
        "query": normal(*tokens, spec.key).astype(dtype),
        "key": l2_normalize(normal(*tokens, spec.key)).astype(dtype),
        "value": normal(*tokens, spec.value).astype(dtype),
        "log_decay": -spec.decay / 6 * forgetting,
        "beta": spec.largest_beta * jax.random.uniform(next(rngs), tokens, jnp.float32),
        "initial_state": normal(spec.batch, spec.heads, spec.key, spec.value),
    }
    return found | starts_of(spec.documents, tokens)


def starts_of(documents: int | None, tokens: tuple[int, ...]) -> dict[str, jax.Array]:
    """The argument `starts` of rows `[batch, length, ...]` with so many documents."""
    if documents is None:
        return {}
    batch, length = tokens[:2]
    places = jnp.arange(length) % (length // documents)
    return {"starts": jnp.broadcast_to((places == 0).at[0].set(False), (batch, length))}


COMPARISON = Comparison(
    specs=SPECS,
    sample=sample,
    call=lambda spec, dtype, **arrays: chunk_gated_delta_rule(**arrays),
    # It has more chunks than the kernels' pipelines have slots, so each slot is filled again.
    checked=("five_chunks",),
    # Rounding a number to bfloat16 changes it by up to 2^-9 of itself.
    ratios={"float32": 2e-4, "bfloat16": 1e-2},
)


BY_LIBRARY = dataclasses.replace(COMPARISON, checked=("documents",), ratios=LIBRARY_RATIOS)


def check(kernel: Implementation) -> None:
    """Raises AssertionError if this device's kernels, or a library's, differ from plain JAX."""
    (BY_LIBRARY if kernel in LIBRARIES else COMPARISON).check(kernel)
