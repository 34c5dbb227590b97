"""The models of the FwPKM paper (arXiv:2601.00671) as experiments, by name.

A name is a backbone, then what it carries: `gdn_swa__pkm6_fwpkm2_10` is "GDN+SWA | PKM@6 +
FwPKM@2,10". Layers are counted from 0. What the paper leaves open (Adam's betas, clipping) has
common values; its text's sizes are the defaults of the dataclasses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fwpkm_jax.config import Experiment
from fwpkm_jax.data import TextData
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.models.config import MixerName, ModelConfig
from fwpkm_jax.rules import FwMLP
from fwpkm_jax.training.config import TrainingConfig
from fwpkm_jax.training.optimizer import OptimizerConfig
from fwpkm_jax.training.state import MemoryConfig


def _twelve(*mixers: MixerName) -> tuple[MixerName, ...]:
    """The mixers over and over, for twelve layers."""
    return mixers * (12 // len(mixers))


BACKBONES: dict[str, tuple[MixerName, ...]] = {
    "gdn": _twelve("gdn"),
    "gdn_swa": _twelve("gdn", "gdn", "gdn", "swa"),
    "gdn_fa": _twelve("gdn", "gdn", "gdn", "attention"),
    "fa": _twelve("attention"),
}
"""Token mixers of the twelve layers: Gated DeltaNet, sliding-window, full attention."""

# Table 1's parameter counts come out with 512 hidden units, Appendix C says 2304
# (`--model.fast_weight.rule.hidden_dim 2304`). A dense memory takes no loss weights.
_FWMLP = FastWeightConfig(rule=FwMLP(hidden_dim=512), weight_by_gate=False)

MEMORIES: dict[str, dict[str, Any]] = {
    "": {},
    "pkm2_6_10": {"pkm_layers": (2, 6, 10)},
    "fwpkm2_6_10": {"memory_layers": (2, 6, 10)},
    "pkm6_fwpkm2_10": {"pkm_layers": (6,), "memory_layers": (2, 10)},
    "fwmlp2_6_10": {"memory_layers": (2, 6, 10), "fast_weight": _FWMLP},
}
"""What a backbone carries: PKM in place of MLPs, fast-weight memories before the mixers."""

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
      ValueError: no such name.
    """
    if name not in (*TABLE_1, *PSWA):
        raise ValueError(f"{name!r} is none of the paper's models: {', '.join(TABLE_1 + PSWA)}.")
    if name == "lact":
        return ModelConfig(mixers=_twelve("lact"), mlp_dim=2048)
    backbone, memory, *_ = [*name.split("__"), ""]
    return ModelConfig(mixers=BACKBONES[backbone], **MEMORIES[memory])


def paper_experiment(name: str) -> Experiment:
    """The training run of a row of Table 1 or of `PSWA`: 20,000 steps of 128 x 4,096 tokens.

    Raises:
      ValueError: no such name.
    """
    return Experiment(
        model=paper_model(name),
        data=TextData(
            train_paths=("data/longcrawl64.train.bin", "data/fineweb_edu.train.bin"),
            train_weights=(0.5, 0.5),
            valid_paths=("data/fineweb_edu.valid.bin",),
            length=4096,
            tokenizer="mistral-v1",
        ),
        optimizer=OptimizerConfig(
            learning_rate=3e-4,
            final_fraction=0.1,
            warmup_steps=100,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            clip_norm=1.0,
        ),
        training=TrainingConfig(
            steps=20_000,
            batch_size=128,
            micro_batches=16,
            memory=MemoryConfig(groups=1, lifetime="carried"),
            window_probability=0.9 if name in PSWA else 0.0,
        ),
        run_dir=f"runs/{name}",
    )


def ablation(name: str, *, rule: dict[str, Any] | None = None, **block: Any) -> Experiment:
    """`ABLATED` with other fields of its memories' rule, or of the block around it.

    Args:
      name: of the run directory below `runs/ablations`.
      rule: fields of the rule to replace.
      **block: fields of `FastWeightConfig` to replace.
    """
    parent = paper_experiment(ABLATED)
    fast_weight = parent.model.fast_weight
    changed = replace(fast_weight, rule=replace(fast_weight.rule, **(rule or {})), **block)
    return replace(
        parent,
        model=replace(parent.model, fast_weight=changed),
        run_dir=f"runs/ablations/{name}",
    )
