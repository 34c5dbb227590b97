"""The models of the FwPKM paper (arXiv:2601.00671) as experiments, by name.

The models themselves stand in `fwpkm_jax.models.paper`. What the paper leaves open (Adam's betas,
clipping) has common values; the sizes that it states are the defaults of the dataclasses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fwpkm_jax.config import Experiment
from fwpkm_jax.data import TextData
from fwpkm_jax.models.paper import (
    ABLATED,
    BACKBONES,
    MEMORIES,
    PSWA,
    TABLE_1,
    paper_model,
)
from fwpkm_jax.training.config import TrainingConfig
from fwpkm_jax.training.optimizer import OptimizerConfig
from fwpkm_jax.training.state import MemoryConfig

__all__ = [
    "ABLATED",
    "BACKBONES",
    "MEMORIES",
    "PSWA",
    "TABLE_1",
    "ablation",
    "paper_experiment",
    "paper_model",
]


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
            # One memory that 16 writes of 8 sequences pass through. The authors train in 4
            # processes: 4 memories, each of which writes 4 sequences at a time. `--training.
            # micro_batches 8 --training.memory.groups 4` has the same grouping.
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
