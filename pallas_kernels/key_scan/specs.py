"""Named shapes of the scan of the keys, and a comparison of two ways to go over the chunks."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fwpkm_jax.core.slots.keys.addressing import best_sub_keys, sub_key_scores
from fwpkm_jax.core.slots.keys.scan import KeyLoops, key_scan
from fwpkm_jax.core.slots.write import KeyWrite
from pallas_kernels.checks import relative_errors, require
from pallas_kernels.dispatch import Kernel
from pallas_kernels.key_scan.api import key_loops
from pallas_kernels.product_top_k import specs as product_top_k_specs
from pallas_kernels.spec import Spec


@dataclass(frozen=True, kw_only=True)
class KeySpec(Spec):
    """Sizes of one scan."""

    chunks: int
    tokens: int
    heads: int = 1
    subkeys: int = 128
    half: int = 128
    top_k: int = 8
    weight_decay: float = 0.0


SPECS = (
    KeySpec(name="two_chunks", chunks=2, tokens=64, top_k=2),
    KeySpec(
        name="two_heads", chunks=3, tokens=704, heads=2, half=256, top_k=3, weight_decay=0.1,
        small=False,
    ),
    # Three tiles of tokens for each part of the sums: one arrives in memory that was in use.
    KeySpec(name="paper_widths", chunks=3, tokens=3072, subkeys=512, half=256, small=False),
)  # fmt: skip
_CANDIDATES = 8
"""Random queries of which each token gets the clearest."""
CHECKED = ("two_heads", "paper_widths")
"""Before the first use of a device's kernels, they are compared with plain XLA on these scans."""
CHECK_RATIO = 1e-4
"""Largest difference allowed in that comparison, relative to a tensor's norm."""
DTYPES = ("float32", "bfloat16")
"""Of the queries; the keys are in float32."""


def check(kernel: Kernel) -> None:
    """Raises AssertionError if this device's kernels differ from plain XLA."""
    product_top_k_specs.check(kernel)
    for spec in (spec for spec in SPECS if spec.name in CHECKED):
        loops = key_loops(kernel, spec.top_k), KeyLoops()
        for dtype in DTYPES:
            errors = errors_of(spec, *loops, dtype=dtype)
            require(errors, CHECK_RATIO, f"{spec.name}, {dtype}")


def errors_of(
    spec: KeySpec, loops: KeyLoops, expected: KeyLoops, *, dtype: DTypeLike = "float32"
) -> dict[str, float]:
    """Differences of keys, scores and all cotangents between two ways, relative to their norms.

    The cotangents of queries in bfloat16 are rounded to it; neighbours there count as equal.
    """
    rngs = jax.random.split(jax.random.key(spec.tokens), 3)
    keys = jax.random.normal(rngs[0], (spec.heads, 2, spec.subkeys, spec.half))
    shape = (spec.chunks, spec.tokens, spec.heads)
    queries = _clear_queries(rngs[1], keys, math.prod(shape[:2]), spec.top_k, dtype)
    queries = queries.reshape(*shape, -1)
    weights = jax.random.uniform(rngs[2], shape[:2])
    key_write = KeyWrite(
        learning_rate=50.0, loss_weight=0.5, score="idw", weight_decay=spec.weight_decay / 50.0
    )

    @functools.partial(jax.jit, static_argnums=0)
    def results(loops: KeyLoops, keys: jax.Array, queries: jax.Array, weights: jax.Array) -> Any:
        def scan(*arrays: jax.Array) -> Any:
            find = functools.partial(best_sub_keys, top_k=spec.top_k)
            out: Any = key_scan(*arrays, find, key_write, loops)
            return (out.keys, out.choice.sub_key_scores), out.choice.sub_key_ids

        out, back, ids = jax.vjp(scan, keys, queries, weights, has_aux=True)
        moved, scores = out
        # Cotangents of the size of what they belong to; those of scores differ by place.
        places = 1.0 + jax.lax.broadcasted_iota(jnp.float32, scores.shape, scores.ndim - 1)
        bars = back((moved, jnp.sin(scores) / places))
        return {"keys": moved, "scores": scores, "ids": ids.astype(jnp.float32), "back": bars}

    actual, right = (results(way, keys, queries, weights) for way in (loops, expected))
    if queries.dtype == jnp.bfloat16:
        of_keys, of_queries, of_weights = actual["back"]
        exact = right["back"][1]
        near = jnp.abs(of_queries - exact) <= 2.0**-7 * jnp.abs(exact)
        actual["back"] = of_keys, jnp.where(near, exact, of_queries), of_weights
    return relative_errors(actual, right)


def _clear_queries(
    rng: jax.Array, keys: jax.Array, tokens: int, top_k: int, dtype: DTypeLike
) -> jax.Array:
    """Queries whose best sub-keys differ clearly, so that both ways choose the same ones."""
    heads, _, _, half = keys.shape
    drawn = jax.random.normal(rng, (_CANDIDATES, tokens, heads, 2 * half))
    drawn = drawn.astype(dtype).astype(keys.dtype)
    scores = jax.vmap(lambda one: sub_key_scores(one, keys))(drawn)
    best = jax.lax.top_k(scores, top_k + 1)[0]
    gap = jnp.min(best[..., :-1] - best[..., 1:], axis=-1)
    chosen = jnp.argmax(gap, axis=0)[None, ..., None]
    halves = drawn.reshape(*gap.shape, half)
    clear = jnp.take_along_axis(halves, chosen, axis=0)[0].reshape(tokens, heads, 2 * half)
    return clear.astype(dtype)
