"""Named shapes of product_top_k."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fwpkm_jax.core.slots.keys.addressing import Score
from pallas_kernels.spec import Spec


@dataclass(frozen=True, kw_only=True)
class TopKSpec(Spec):
    """Sizes of one call, and how queries and keys are drawn."""

    tokens: int
    heads: int = 1
    subkeys: int
    key: int
    top_k: int
    score: Score = "idw"
    draw: Literal["normal", "integer", "same"] = "normal"
    """`integer`: small whole numbers, so that sums are exact and many scores are equal. `same`: all
    queries are equal and all keys are equal, so that all scores are equal."""


SPECS = (
    TopKSpec(name="one_token", tokens=1, subkeys=16, key=8, top_k=8),
    TopKSpec(name="63_tokens", tokens=63, heads=2, subkeys=24, key=16, top_k=8),
    TopKSpec(name="100_tokens", tokens=100, subkeys=128, key=16, top_k=8),
    TopKSpec(name="two_tiles", tokens=300, subkeys=136, key=12, top_k=4, score="dot"),
    TopKSpec(name="top_32", tokens=20, subkeys=32, key=16, top_k=32, score="dot"),
    TopKSpec(name="odd_sizes", tokens=5, heads=3, subkeys=5, key=6, top_k=3),
    TopKSpec(name="one_slot", tokens=70, subkeys=4, key=4, top_k=1),
    TopKSpec(
        name="ties", tokens=40, heads=2, subkeys=24, key=4, top_k=8, score="dot", draw="integer"
    ),
    TopKSpec(
        name="all_the_same", tokens=33, subkeys=20, key=4, top_k=8, score="dot", draw="same"
    ),
    TopKSpec(name="steady", tokens=200, subkeys=512, key=512, top_k=8, small=False),
    TopKSpec(
        name="steady_dot", tokens=100, heads=2, subkeys=300, key=512, top_k=32, score="dot",
        small=False,
    ),
    TopKSpec(name="paper", tokens=4096, subkeys=512, key=512, top_k=8, small=False, compiled=True),
    TopKSpec(
        name="paper_pkm", tokens=4096, heads=4, subkeys=512, key=512, top_k=32, score="dot",
        draw="integer", small=False,
    ),
    TopKSpec(
        name="widest", tokens=4096, heads=4, subkeys=1024, key=512, top_k=32, score="dot",
        draw="integer", small=False, compiled=True,
    ),
    TopKSpec(name="million_slots", tokens=4096, subkeys=1024, key=512, top_k=8, small=False),
    TopKSpec(name="few_sub_keys", tokens=4096, subkeys=128, key=512, top_k=8, small=False),
    TopKSpec(
        name="paper_ties", tokens=4096, subkeys=512, key=512, top_k=8, score="dot",
        draw="integer", small=False,
    ),
)  # fmt: skip
CHECKED = ("steady", "steady_dot")
"""Before the first use of a device's kernel, it is compared with the reference on these calls. They
have the paper's widths, and many more tiles of keys than the kernel's pipeline has slots."""
CHECK_RATIO = 1e-5
"""Largest difference allowed in that comparison, relative to the norm of all scores."""


def sample(spec: TopKSpec, dtype: DTypeLike) -> dict[str, jax.Array]:
    """Random queries and keys for one call."""
    query_rng, key_rng = jax.random.split(jax.random.key(spec.tokens))
    shapes = {
        "queries": (query_rng, (spec.tokens, spec.heads, spec.key)),
        "keys": (key_rng, (spec.heads, 2, spec.subkeys, spec.key // 2)),
    }
    if spec.draw == "same":
        return {name: jnp.full(shape, 0.5, dtype) for name, (_, shape) in shapes.items()}
    if spec.draw == "integer":
        whole = {n: jax.random.randint(rng, shape, -2, 3) for n, (rng, shape) in shapes.items()}
        return {name: array.astype(dtype) for name, array in whole.items()}
    return {n: jax.random.normal(rng, shape, dtype) for n, (rng, shape) in shapes.items()}
