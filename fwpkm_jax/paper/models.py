"""The models of the FwPKM paper (arXiv:2601.00671) by name.

A name is a backbone, then its memories: `gdn_swa__pkm6_fwpkm2_10` is the paper's "GDN+SWA | PKM@6 +
FwPKM@2,10". Layers are counted from 0.
"""

from typing import Any

from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers import GatedDeltaNetConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.rules import FwMLP


def _twelve(*mixers: str) -> tuple[str, ...]:
    """Repeats the mixers to fill twelve layers."""
    return mixers * (12 // len(mixers))


BACKBONES: dict[str, tuple[str, ...]] = {
    "gdn": _twelve("gdn"),
    "gdn_swa": _twelve("gdn", "gdn", "gdn", "swa"),
    "gdn_fa": _twelve("gdn", "gdn", "gdn", "attention"),
    "fa": _twelve("attention"),
}
"""Token mixers of the twelve layers: Gated DeltaNet, sliding-window, full attention."""

_GDN = GatedDeltaNetConfig(decay_start="constant")  # As in the authors' release.

# 512 hidden units give Table 1's parameter counts; Appendix C states 2304
# (`--model.fast_weight.rule.hidden_dim 2304`). A dense memory does not weight its loss by the gate.
_FWMLP = FastWeightConfig(rule=FwMLP(hidden_dim=512), weight_by_gate=False)

MEMORIES: dict[str, dict[str, Any]] = {
    "": {},
    "pkm2_6_10": {"pkm_layers": (2, 6, 10)},
    "fwpkm2_6_10": {"memory_layers": (2, 6, 10)},
    "pkm6_fwpkm2_10": {"pkm_layers": (6,), "memory_layers": (2, 10)},
    "fwmlp2_6_10": {"memory_layers": (2, 6, 10), "fast_weight": _FWMLP},
}
"""Memories of a backbone: PKM in place of MLPs, fast-weight memories before the mixers."""

TABLE_1: tuple[str, ...] = (
    *(
        f"{backbone}__{memory}" if memory else backbone
        for backbone in BACKBONES
        for memory in MEMORIES
        if memory != "fwmlp2_6_10"
    ),
    *(f"{backbone}__fwmlp2_6_10" for backbone in BACKBONES),
    "lact",
)
"""The rows of the paper's Table 1, in its order."""

PSWA = tuple(f"{b}__{m}__pswa" for b in ("gdn_fa", "fa") for m in ("fwpkm2_6_10", "pkm6_fwpkm2_10"))
"""Full attention limited to 512 tokens in nine of ten training steps (section 4.2)."""

ABLATED = "gdn_swa__pkm6_fwpkm2_10"
"""The model that Appendix D varies."""


def paper_model(name: str) -> ModelConfig:
    """The model of a row of Table 1 or of `PSWA`.

    Raises:
      ValueError: the name is in neither.
    """
    if name not in (*TABLE_1, *PSWA):
        raise ValueError(f"{name!r} is none of the paper's models: {', '.join(TABLE_1 + PSWA)}.")
    if name == "lact":
        return ModelConfig(mixers=_twelve("lact"), mlp_dim=2048)
    backbone, memory, *_ = [*name.split("__"), ""]
    return ModelConfig(mixers=BACKBONES[backbone], gdn=_GDN, **MEMORIES[memory])
