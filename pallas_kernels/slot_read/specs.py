"""Named shapes of the operations on table rows, and how their slots are drawn."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.slot_read.api import slot_dot, slot_read
from pallas_kernels.spec import Comparison, Spec


@dataclass(frozen=True, kw_only=True)
class RowSpec(Spec):
    """Sizes of one call, and which slots its tokens read."""

    tokens: int
    places: int = 8
    slots: int = 256
    value: int = 128
    drawn: Literal["random", "zipf", "one", "distinct"] = "random"
    """random: uniform. zipf: the r-th slot in proportion to 1 / r. one: all the same. distinct: no
    slot twice."""
    errors: bool = False
    """Whether errors are computed as well."""


SPECS = (
    RowSpec(name="one_token", tokens=1, errors=True),
    RowSpec(name="one_reference", tokens=1, places=1, slots=1),
    RowSpec(name="63_tokens", tokens=63, places=2, slots=40, value=256, errors=True),
    RowSpec(name="100_tokens", tokens=100, places=1, value=384),
    RowSpec(name="one_slot", tokens=100, places=1, drawn="one", errors=True),
    RowSpec(name="three_slots", tokens=100, places=2, slots=3),
    RowSpec(name="distinct", tokens=16, places=3, drawn="distinct", value=512),
    RowSpec(name="zipf", tokens=63, places=3, drawn="zipf", errors=True),
    RowSpec(name="many_places", tokens=3, places=128, slots=50, value=256),
    RowSpec(name="many_tiles", tokens=650, places=8, slots=64, errors=True),
    RowSpec(name="hot", tokens=700, places=8, drawn="zipf", errors=True, small=False),
    RowSpec(name="hottest", tokens=1000, places=8, drawn="one", value=512, small=False),
    RowSpec(name="wide_distinct", tokens=128, drawn="distinct", slots=4096, value=512, small=False),
    RowSpec(name="wide_zipf", tokens=700, drawn="zipf", slots=4096, value=512, small=False),
    RowSpec(
        name="chunk",
        tokens=512,
        slots=512**2,
        value=512,
        errors=True,
        small=False,
        compiled=True,
    ),
    RowSpec(
        name="paper",
        tokens=4096,
        slots=512**2,
        value=512,
        errors=True,
        small=False,
        compiled=True,
    ),
    RowSpec(name="paper_places", tokens=512, places=128, slots=512**2, small=False, compiled=True),
)
CHECKED = ("wide_distinct", "wide_zipf", "hottest")
"""Before the first use of a device's kernels, they are compared with the reference on these calls.
They have the paper's width. Their slots are read once, or a few are read often, or every token
reads the same slot, which makes a run much longer than a single owner sums."""
CHECK_RATIOS = {"float32": 1e-5}
"""Largest difference allowed in that comparison, relative to a tensor's norm."""


def draw_slots(spec: RowSpec, rng: np.random.Generator) -> np.ndarray:
    """Slots of every place, `[tokens, places]`."""
    size = (spec.tokens, spec.places)
    if spec.drawn == "one":
        return np.full(size, spec.slots // 2, np.int32)
    if spec.drawn == "distinct":
        return rng.permutation(spec.slots)[: spec.tokens * spec.places].reshape(size).astype("i4")
    if spec.drawn == "random":
        return rng.integers(spec.slots, size=size, dtype=np.int32)
    # Inverts the cumulative distribution ln(1 + r) / ln(1 + slots), then spreads popular slots.
    rank = np.exp(rng.random(size) * np.log(spec.slots + 1.0)).astype(np.int64) - 1
    return (rank * 2654435761 % spec.slots).astype(np.int32)


def sample(spec: RowSpec, dtype: DTypeLike) -> dict[str, jax.Array]:
    """The arguments of one `slot_read`. If `spec.errors` is False, leave out the last two."""
    rng = np.random.default_rng(spec.tokens)
    slot_ids = jnp.asarray(draw_slots(spec, rng))
    rngs = jax.random.split(jax.random.key(spec.tokens), 4)
    return {
        "values": jax.random.normal(rngs[0], (spec.slots, spec.value), dtype),
        "slot_ids": slot_ids,
        "weights": jax.random.uniform(rngs[1], slot_ids.shape, dtype),
        "target": jax.random.normal(rngs[2], (spec.tokens, spec.value), dtype),
        "write_weight": jax.random.uniform(rngs[3], (spec.tokens,), dtype),
    }


def sample_dot(spec: RowSpec, dtype: DTypeLike) -> dict[str, jax.Array]:
    """The arguments of one `slot_dot`."""
    arrays = sample(spec, dtype)
    vectors = jax.random.normal(jax.random.key(1), (spec.tokens, spec.value), dtype)
    return {"values": arrays["values"], "slot_ids": arrays["slot_ids"], "vectors": vectors}


READS = Comparison(
    specs=SPECS,
    sample=sample,
    call=lambda spec, dtype, **arrays: slot_read(**arrays),
    checked=CHECKED,
    ratios=CHECK_RATIOS,
)
DOTS = Comparison(
    specs=SPECS,
    sample=sample_dot,
    call=lambda spec, dtype, **arrays: slot_dot(**arrays),
    checked=CHECKED,
    ratios=CHECK_RATIOS,
)
