"""The models of the FwPKM paper (arXiv:2601.00671) by name: Table 1, section 4.2, Appendix D.

    fwpkm train gdn_swa__pkm6_fwpkm2_10 \
        --data.train_paths longcrawl64.bin fineweb_edu.bin --data.valid_paths valid.bin

trains the paper's headline hybrid "GDN+SWA | PKM@6 + FwPKM@2,10": 516.31M parameters, fast weights
included; 113.73M active per token. Needs accelerators: not trained here yet.

A name is a backbone, then its memories. `fwpkm_jax.paper.models` has the tables of both. All models
have one training run, `paper_experiment`. What the paper leaves open (Adam's betas, clipping) has
common values; the sizes that it states are the defaults of the dataclasses.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fwpkm_jax.config import Experiment
from fwpkm_jax.data import TextData
from fwpkm_jax.paper.models import ABLATED, PSWA, TABLE_1, paper_model
from fwpkm_jax.training.optimizer import OptimizerConfig
from fwpkm_jax.training.state import MemoryConfig
from fwpkm_jax.training.training_config import TrainingConfig

ABLATIONS: dict[str, dict[str, Any]] = {
    # The reconstruction error moves keys and values.
    "without_addressing_loss": {"rule": {"key_loss": "reconstruction"}},
    # The read is added to the value, and every token writes in full.
    "without_gating": {"gate_output": False, "weight_by_gate": False},
    # The gate mixes the output but weighs no write.
    "without_loss_weight": {"weight_by_gate": False},
    # Targets are not standardised.
    "without_value_norm": {"value_norm": "none"},
    # A token writes its own value.
    "without_lookahead": {"rule": {"lookahead": 0}},
    # A token reads 8 slots by each of four queries.
    "four_heads_top8": {"rule": {"num_heads": 4}},
    # A token reads 32 slots by one query.
    "one_head_top32": {"rule": {"top_k": 32}},
    # The paper left its numbers out, for it often diverges.
    "dot_scores": {"rule": {"score": "dot"}},
}
"""Appendix D: what each changes in the memories of `ABLATED`, as the arguments of `ablation`."""


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
        parent, model=replace(parent.model, fast_weight=changed), run_dir=f"runs/ablations/{name}"
    )


CONFIGS: Mapping[str, Callable[[], Experiment]] = {
    **{name: partial(paper_experiment, name) for name in (*TABLE_1, *PSWA)},
    **{
        f"ablations/{name}": partial(ablation, name, **changes)
        for name, changes in ABLATIONS.items()
    },
}
"""The runs of this file by name."""
