"""Named shapes of residual sums with their norms."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.add_rms_norm.api import add_rms_norm
from pallas_kernels.spec import Comparison, Spec


@dataclass(frozen=True, kw_only=True)
class NormSpec(Spec):
    """Sizes of one call, and whether a branch is added."""

    batch: int = 1
    length: int
    width: int
    branch: bool = True
    eps: float = 1e-5


SPECS = (
    NormSpec(name="one_token", length=1, width=128),
    NormSpec(name="63_tokens", batch=3, length=21, width=256),
    NormSpec(name="norm_alone", length=6, width=768, branch=False),
    NormSpec(name="100_tokens", length=100, width=768, small=False),
    NormSpec(name="widest", batch=2, length=600, width=2048, small=False, compiled=True),
    NormSpec(name="paper", batch=8, length=4096, width=768, small=False, compiled=True),
    NormSpec(
        name="paper_alone",
        batch=8,
        length=4096,
        width=768,
        branch=False,
        small=False,
        compiled=True,
    ),
)


def sample(spec: NormSpec, dtype: DTypeLike) -> dict[str, jax.Array | None]:
    """The arguments of one call but `eps`."""
    rngs = jax.random.split(jax.random.key(spec.width), 3)
    shape = (spec.batch, spec.length, spec.width)
    return {
        "x": 2 * jax.random.normal(rngs[0], shape, dtype),
        "branch": jax.random.normal(rngs[1], shape, dtype) if spec.branch else None,
        "scale": 1 + 0.3 * jax.random.normal(rngs[2], (spec.width,), jnp.float32),
    }


COMPARISON = Comparison(
    specs=SPECS,
    sample=sample,
    call=lambda spec, dtype, **arrays: add_rms_norm(**arrays, eps=spec.eps),
    checked=("100_tokens", "paper", "paper_alone"),
    # The reference rounds its cotangents to bfloat16 before it adds them.
    ratios={"float32": 1e-5, "bfloat16": 8e-3},
)
