"""Named shapes of embeddings."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.embed.api import embed
from pallas_kernels.spec import Comparison, Spec


@dataclass(frozen=True, kw_only=True)
class EmbedSpec(Spec):
    """Sizes of one call."""

    batch: int = 1
    length: int
    vocab: int
    width: int


SPECS = (
    EmbedSpec(name="one_token", length=1, vocab=4, width=128),
    EmbedSpec(name="63_tokens", batch=3, length=21, vocab=16, width=256),
    # Half of the tokens are one: more than a program adds up by itself.
    EmbedSpec(name="one_often", batch=2, length=150, vocab=8, width=128),
    EmbedSpec(name="100_tokens", length=100, vocab=300, width=768, small=False),
    EmbedSpec(name="widest", length=600, vocab=300, width=1024, small=False, compiled=True),
    EmbedSpec(
        name="paper", batch=8, length=4096, vocab=32000, width=768, small=False, compiled=True
    ),
)


def sample(spec: EmbedSpec, dtype: DTypeLike) -> dict[str, jax.Array]:
    """The arrays of one call; few tokens are frequent, as in text, and the first one is half."""
    rngs = jax.random.split(jax.random.key(spec.width), 3)
    shape = (spec.batch, spec.length)
    rank = jnp.exp(jax.random.uniform(rngs[0], shape) * jnp.log(spec.vocab))
    tokens = jnp.minimum(rank.astype(jnp.int32), spec.vocab - 1)
    return {
        "table": jax.random.normal(rngs[1], (spec.vocab, spec.width), dtype),
        "tokens": jnp.where(jax.random.bernoulli(rngs[2], 0.5, shape), 0, tokens),
    }


COMPARISON = Comparison(
    specs=SPECS,
    sample=sample,
    call=lambda spec, dtype, **arrays: embed(**arrays),
    checked=("one_often", "100_tokens"),
    ratios={"float32": 1e-5},
)
