"""Low-rank updates (LoRA) of linear maps: two thin factors beside a kernel that can stay frozen."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fwpkm_jax.core.checks import check_rngs
from fwpkm_jax.layers.parameters import declaration_of, parameter
from fwpkm_jax.literals import Count, Positive, check_fields

FACTORS = ("lora_a", "lora_b")
"""Names of the factors' parameters, beside the map's `kernel`: `[in, rank]` and `[rank, out]`."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    r"""Which linear maps get a low-rank update, and its size.

    A map's output is `x W + alpha / rank * (x A) B`. `B` starts at zero, so a model that gets
    updates computes what it did before. Train them alone with
    `OptimizerConfig(train=(r".*/lora_[ab]",))`.

    Example:
      >>> from fwpkm_jax.layers import LoRAConfig
      >>> LoRAConfig(maps=(r"blocks/\d+/mixer/(query|value)_proj",), rank=4).alpha
      16.0

    References: Hu et al. 2021, arXiv:2106.09685.
    """

    maps: tuple[str, ...] = (r"blocks/\d+/(mixer|feed_forward)/.*",)
    """Patterns (`re.fullmatch`) of the paths of linear maps. The default has those of the token
    mixers and MLPs."""
    rank: Count = 8
    """Width of the factors."""
    alpha: Positive = 16.0
    """The update is multiplied by alpha / rank."""

    def __post_init__(self) -> None:
        if not self.maps:
            raise ValueError("maps=() names no linear map; use lora=None for no updates.")
        for pattern in self.maps:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"maps: {pattern!r} is no pattern: {error}.") from error
        check_fields(self)

    @property
    def scale(self) -> float:
        """What multiplies the product of the factors."""
        return self.alpha / self.rank


class LoRALinear(nnx.Linear):
    """A linear map with a low-rank update; kernel and bias are those of the map that it replaces.

    The factors are float32; the computation has the dtype of the map's.
    """

    def __init__(self, linear: nnx.Linear, config: LoRAConfig, *, rngs: nnx.Rngs):
        """Adds the factors: `A` uniform within +- 1 / sqrt(in), `B` zero."""
        check_rngs(rngs)
        # Everything that the map was made with; its parameters keep their paths.
        for name, value in vars(linear).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        inputs, outputs = linear.kernel.shape
        bound = inputs**-0.5
        a = jax.random.uniform(rngs.params(), (inputs, config.rank), minval=-bound, maxval=bound)
        self.scale = config.scale
        declared = declaration_of(linear.kernel)
        rows, columns = (None, None) if declared is None else declared.axes_of(linear.kernel.shape)
        self.lora_a = parameter(a, "matrix", (rows, None))
        # With B = 0 the model computes what it did before.
        self.lora_b = parameter(jnp.zeros((config.rank, outputs)), "matrix", (None, columns))

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        y = super().__call__(inputs, out_sharding)
        x, a, b = self.promote_dtype((inputs, self.lora_a[...], self.lora_b[...]), dtype=self.dtype)
        return y + (self.scale * ((x @ a) @ b)).astype(y.dtype)


def add_low_rank(model: nnx.Module, config: LoRAConfig, *, rngs: nnx.Rngs) -> None:
    """Replaces the linear maps that match by `LoRALinear`.

    Raises:
      ValueError: a pattern matches no linear map.
    """
    linears = {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.Linear)
    }
    for pattern in config.maps:
        if not any(re.fullmatch(pattern, name) for name in linears):
            raise ValueError(
                f"lora.maps: {pattern!r} matches no linear map; their paths are like "
                f"{min(linears)} and {max(linears)}."
            )
    for name in sorted(linears):
        if any(re.fullmatch(pattern, name) for pattern in config.maps):
            holder: Any = model
            *path, last = name.split("/")
            for key in path:
                holder = holder[int(key)] if key.isdigit() else getattr(holder, key)
            setattr(holder, last, LoRALinear(linears[name], config, rngs=rngs))


def merged(named: Mapping[str, jax.Array], config: LoRAConfig) -> dict[str, jax.Array]:
    """The parameters of the equal model without updates; changed kernels are float32."""
    plain = {name: x for name, x in named.items() if name.rsplit("/", 1)[-1] not in FACTORS}
    for name, b in named.items():
        if name.endswith(f"/{FACTORS[1]}"):
            path = name.removesuffix(FACTORS[1])
            # In float32: a small update would be lost beside a bfloat16 kernel.
            kernel = jnp.asarray(plain[f"{path}kernel"], jnp.float32)
            plain[f"{path}kernel"] = kernel + config.scale * (named[path + FACTORS[0]] @ b)
    return plain
