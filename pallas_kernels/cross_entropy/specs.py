"""Named shapes of rows of logits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy.api import row_cross_entropy
from pallas_kernels.spec import Comparison, Spec


@dataclass(frozen=True, kw_only=True)
class RowSpec(Spec):
    """Sizes of one call, and the spread of its logits."""

    tokens: int
    vocab: int
    scale: float = 3.0
    """Standard deviation of the logits."""


SPECS = (
    RowSpec(name="one_group", tokens=3, vocab=128),
    RowSpec(name="one_tile", tokens=2, vocab=4096),
    RowSpec(name="tiles_and_rest", tokens=3, vocab=2 * 4096 + 384),
    RowSpec(name="far_apart", tokens=2, vocab=4096 + 256, scale=100.0),
    RowSpec(name="100_tokens", tokens=100, vocab=50_304, small=False),
    RowSpec(name="widest", tokens=133, vocab=56_320, small=False, compiled=True),
    RowSpec(name="paper", tokens=2048, vocab=32_000, small=False, compiled=True),
)


def sample(spec: RowSpec, dtype: object = jnp.float32) -> dict[str, jax.Array]:
    """Logits, labels and weights; every fourth weight is 0. The dtype is always float32.

    The labels of the first rows are the first and the last of the vocabulary.
    """
    rngs = jax.random.split(jax.random.key(spec.vocab), 3)
    labels = jax.random.randint(rngs[1], (spec.tokens,), 0, spec.vocab)
    ends = jnp.asarray([0, spec.vocab - 1])[: spec.tokens]
    weights = jax.random.uniform(rngs[2], (spec.tokens,))
    return {
        "logits": spec.scale * jax.random.normal(rngs[0], (spec.tokens, spec.vocab)),
        "labels": labels.at[: len(ends)].set(ends),
        "weights": jnp.where(jnp.arange(spec.tokens) % 4 == 3, 0.0, weights),
    }


COMPARISON = Comparison(
    specs=SPECS,
    sample=sample,
    call=lambda spec, dtype, **arrays: row_cross_entropy(**arrays, dtype=dtype),
    checked=("tiles_and_rest", "paper"),
    # In bfloat16, numbers that differ in float32's last bits may round to neighbours.
    ratios={"float32": 2e-5, "bfloat16": 2e-3},
    fixed=("logits", "weights"),
)
