"""Named shapes of product_top_k."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fwpkm_jax.core.slots.keys.addressing import Score, product_top_k, sub_key_scores
from pallas_kernels.checks import require
from pallas_kernels.dispatch import Backend, Kernel
from pallas_kernels.product_top_k.api import select_slots
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


def check(_: Kernel) -> None:
    """Raises AssertionError if this device's kernels differ from plain JAX."""
    for spec in (spec for spec in SPECS if spec.name in CHECKED):
        errors = selection_errors("pallas", spec, sample(spec, jnp.float32))
        require(errors, CHECK_RATIO, spec.name)


def selection_errors(
    backend: Backend, spec: TopKSpec, arrays: dict[str, jax.Array]
) -> dict[str, float]:
    """Differences of an implementation's best scores, and of its ids' scores, from the reference.

    Among thousands of scores some differ by less than rounding, so either order is correct.
    Therefore ids are compared by the scores that the reference gives them. Ids must not repeat.

    Returns:
      Differences relative to the norm, by name; `repeated_ids` is the share of repeated ids.
    """

    @jax.jit
    def errors(queries: jax.Array, keys: jax.Array) -> dict[str, jax.Array]:
        how: Any = {"top_k": spec.top_k, "score": spec.score}
        actual = select_slots(queries, keys, **how, backend=backend).address
        expected = product_top_k(queries, keys, **how)
        every = sub_key_scores(queries, keys, score=spec.score)
        rows, columns = actual.slot_ids // spec.subkeys, actual.slot_ids % spec.subkeys
        of_slots = sum(
            jnp.take_along_axis(every[:, :, codebook], ids, axis=-1)
            for codebook, ids in enumerate((rows, columns))
        )
        of_sub_keys = jnp.take_along_axis(every, actual.sub_key_ids, axis=-1)
        found = {
            "slot_scores": (actual.slot_scores, expected.slot_scores),
            "sub_key_scores": (actual.sub_key_scores, expected.sub_key_scores),
            "scores of slot_ids": (of_slots, expected.slot_scores),
            "scores of sub_key_ids": (of_sub_keys, expected.sub_key_scores),
        }
        norms = {
            name: jnp.linalg.norm((a - e).ravel()) / jnp.linalg.norm(e.ravel())
            for name, (a, e) in found.items()
        }
        ids = (actual.slot_ids, actual.sub_key_ids)
        return norms | {"repeated_ids": jnp.stack([_repeated(x) for x in ids]).max()}

    return {name: float(error) for name, error in errors(**arrays).items()}


def _repeated(ids: jax.Array) -> jax.Array:
    """The share of ids that equal another id of the same query."""
    ids = jnp.sort(ids, axis=-1)
    return jnp.mean((ids[..., 1:] == ids[..., :-1]).astype(jnp.float32))
