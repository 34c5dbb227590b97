"""The sizes at which the program runs: the real one, a rehearsal's for a CPU, and a test's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from fwpkm_jax.layers.mixers import GatedDeltaNetConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.rules import FwPKM
from lab.study.real_size.models import MEMORIES, real_size_model

SizeName = Literal["real", "rehearsal", "tiny"]
VARIANTS: dict[str, str] = dict(zip(("backbone", "fwpkm", "pkm", "both"), MEMORIES, strict=True))
"""Name in `lab.study.real_size.models` of each variant."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Everything that differs between the sizes."""

    length: int
    """Bytes of a training row, and of the pieces in which a text is read."""
    chunk_size: int
    """Bytes between two writes of a memory."""
    ask_length: int
    """Bytes of a row that ends with a question and its answer."""
    batch: int = 8
    """Rows of a step; each has its own memory."""
    learning_rate: float = 1.5e-3
    """Peak of the schedule."""
    needles: int = 8
    """Needles that a chosen training row states."""
    turn: int = 25
    """Steps of a variant before the next one's turn."""
    sections: tuple[int, ...] = (2, 8)
    """Ends of the sections of a book for which losses are stored, in rows; the last one goes on."""
    haystacks: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Lengths of haystacks, in rows."""


SIZES: dict[SizeName, Size] = {
    "real": Size(length=4096, chunk_size=512, ask_length=512),
    "rehearsal": Size(
        length=1024, chunk_size=128, ask_length=384, batch=4, learning_rate=3e-3, needles=4, turn=5
    ),
    "tiny": Size(
        length=768, chunk_size=128, ask_length=192, batch=2, needles=2, turn=2, haystacks=(1, 2)
    ),
}


def model_of(variant: str, size: SizeName) -> ModelConfig:
    """The variant at a size: the shipped model, or a narrower one; tiny has two layers."""
    model = real_size_model(VARIANTS[variant])
    if size == "real":
        return model
    wide: dict[str, Any] = {"model_dim": 160, "mlp_dim": 448}
    head, subkeys, width, heads = 32, 128, 128, 4
    if size == "tiny":
        wide = {"model_dim": 32, "mlp_dim": 48, "mixers": ("gdn",) * 2}
        wide |= {"memory_layers": (1,) if model.memory_layers else ()}
        wide |= {"pkm_layers": (0,) if model.pkm_layers else ()}
        head, subkeys, width, heads = 8, 16, 16, 2
    rule = FwPKM(num_subkeys=subkeys, key_dim=width, value_dim=width)
    return replace(
        model,
        **wide,
        gdn=GatedDeltaNetConfig(
            num_key_heads=heads, num_value_heads=heads, key_head_dim=head, value_head_dim=head
        ),
        fast_weight=replace(model.fast_weight, rule=rule, chunk_size=SIZES[size].chunk_size),
        pkm=replace(
            model.pkm, num_subkeys=subkeys, key_dim=width, value_dim=width, num_heads=2, top_k=8
        ),
        init_std=0.05,
        activation_dtype="float32",
    )
