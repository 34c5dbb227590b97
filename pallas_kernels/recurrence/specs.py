"""Named shapes of the recurrence, one of each kind that other packages have kernels for."""

from dataclasses import dataclass
from typing import Literal

import jax
from jax.typing import DTypeLike

from fwpkm_jax.core.numerics import l2_normalize
from pallas_kernels.gated_delta.specs import starts_of
from pallas_kernels.recurrence.api import linear_recurrence
from pallas_kernels.spec import LIBRARY_RATIOS, Comparison, Spec


@dataclass(frozen=True, kw_only=True)
class RecurrenceSpec(Spec):
    """Sizes of one call, and what its tokens have."""

    length: int = 300
    heads: int = 2
    width: int = 128
    """Of keys and values."""
    decay: Literal["none", "head", "key"]
    delta: bool
    documents: int | None = 3


SPECS = (
    RecurrenceSpec(name="deltanet", decay="none", delta=True),
    RecurrenceSpec(name="kda", decay="key", delta=True),
    RecurrenceSpec(name="gla", decay="key", delta=False),
    RecurrenceSpec(name="retnet", decay="head", delta=False),
    RecurrenceSpec(name="linear_attention", decay="none", delta=False),
)


def sample(spec: RecurrenceSpec, dtype: DTypeLike) -> dict[str, jax.Array | None]:
    """Random arguments, with keys of unit length; queries, keys and values have `dtype`."""
    rngs = jax.random.split(jax.random.key(spec.length), 6)
    tokens = (1, spec.length, spec.heads)
    wide = (*tokens, spec.width)
    query, key, value = (jax.random.normal(rng, wide) for rng in rngs[:3])
    shape = {"none": None, "head": tokens, "key": wide}[spec.decay]
    decay = None if shape is None else -0.02 * jax.random.exponential(rngs[3], shape) ** 3
    return {
        "query": query.astype(dtype),
        "key": l2_normalize(key).astype(dtype),
        "value": value.astype(dtype),
        "log_decay": decay,
        "beta": jax.random.uniform(rngs[4], tokens) if spec.delta else None,
        "initial_state": jax.random.normal(rngs[5], (1, spec.heads, spec.width, spec.width)),
        **starts_of(spec.documents, tokens),
    }


COMPARISON = Comparison(
    specs=SPECS,
    sample=sample,
    call=lambda spec, dtype, **arrays: linear_recurrence(**arrays),
    checked=tuple(spec.name for spec in SPECS),
    ratios=LIBRARY_RATIOS,
)
