"""The paper's models by name, whole or shrunk until a CPU steps through them in a second."""

from dataclasses import replace
from typing import Any, Literal, cast, get_args

from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers.attention import AttentionConfig
from fwpkm_jax.layers.mixers.gated_delta_net import GatedDeltaNetConfig
from fwpkm_jax.layers.pkm import PKMConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.remat import Remat
from fwpkm_jax.paper.models import paper_model
from fwpkm_jax.rules import FwPKM

Size = Literal["tiny", "paper"]
REMAT, FROZEN = "__remat", "__frozen"
"""Endings of a name: `training.remat=block`, or `__remat_NAME` for another one, and a backbone that
does not train."""
TINY_LAYERS = 4


def model_of(name: str, size: Size, *, layers: int | None = None) -> ModelConfig:
    """The model `name`, a row of the paper's Table 1.

    Args:
      name: as in `fwpkm_jax.paper.models`; trailing `__frozen` and `__remat` are ignored here.
      size: paper: 12 layers, 768 wide, 512**2 slots; tiny: the first 4 layers, 64 wide, 64**2
        slots.
      layers: only the first so many layers.

    Raises:
      ValueError: the paper has no such model.
    """
    model = paper_model(_without_remat(name).removesuffix(FROZEN))
    if size == "tiny":
        model = first_layers(replace(model, **_tiny()), TINY_LAYERS)
    return model if layers is None else first_layers(model, layers)


def first_layers(model: ModelConfig, number: int) -> ModelConfig:
    """The model cut after so many layers."""
    cut: dict[str, Any] = {
        name: tuple(i for i in getattr(model, name) if i < number)
        for name in ("memory_layers", "pkm_layers")
    }
    return replace(model, mixers=model.mixers[:number], **cut)


def remat_of(name: str) -> Remat | None:
    """The `training.remat` that a name asks for by `__remat` or `__remat_NAME` at its end.

    Raises:
      ValueError: there is no rematerialisation of this name.
    """
    if REMAT not in name:
        return None
    remat = name.partition(REMAT)[2].removeprefix("_") or "block"
    if remat not in get_args(Remat):
        raise ValueError(f"{name}: {remat} is none of {', '.join(get_args(Remat))}.")
    return cast(Remat, remat)


def _without_remat(name: str) -> str:
    return name.partition(REMAT)[0]


def train_of(name: str) -> tuple[str, ...]:
    """The `optimizer.train` that a name asks for by `__frozen` at its end, before any `__remat`."""
    return (".*/memory/.*",) if _without_remat(name).endswith(FROZEN) else ()


def baseline_of(name: str) -> str:
    """The name of the backbone, which has no memory."""
    return name.split("__")[0]


def _tiny() -> dict[str, Any]:
    rule = FwPKM(num_subkeys=64, key_dim=64, value_dim=64)
    return {
        "vocab_size": 512,
        "model_dim": 64,
        "mlp_dim": 128,
        "window": 64,
        "attention": AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=32),
        "gdn": GatedDeltaNetConfig(
            num_key_heads=2, num_value_heads=2, key_head_dim=32, value_head_dim=32
        ),
        "fast_weight": FastWeightConfig(rule=rule, chunk_size=64),
        "pkm": PKMConfig(num_subkeys=64, key_dim=64, value_dim=64, num_heads=2, top_k=8),
        "activation_dtype": "float32",
    }
