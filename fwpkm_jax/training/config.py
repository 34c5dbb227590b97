"""How long a run is, how its batches and memories are cut, and which settings change no number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fwpkm_jax.literals import check_literals
from fwpkm_jax.models.block import Remat
from fwpkm_jax.training.micro_batches import check_split
from fwpkm_jax.training.state import MemoryConfig

WITHOUT_EFFECT = (
    "run_dir",
    "mesh",
    "distributed",
    "checkpoint",
    "log",
    "profile",
    "training.log_every",
    "training.validate_every",
    "training.validation_batches",
    "data.num_workers",
)
"""Where a run writes, what it reports and how often, who prepares its batches, which devices and
processes share the work: training computes the same, over other devices up to rounding."""

LogName = Literal["tensorboard", "wandb"]
"""What metrics can be sent to."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length of the run, its batches and its memories.

    Example:
      >>> from fwpkm_jax import TrainingConfig
      >>> TrainingConfig(steps=600, batch_size=16, micro_batches=2).batch_size
      16
    """

    steps: int = 1000
    """Training steps in all. A finished run continues when this grows."""
    batch_size: int = 8
    """Sequences per step."""
    micro_batches: int = 1
    """Pieces a batch is worked off in, one after the other, to save memory."""
    loss_block: int = 2048
    """Tokens whose logits exist at once in the training loss; smaller takes less memory."""
    remat: Remat | None = None
    """block: the backward pass computes each layer again, but for its memory, rather than keep what
    is inside; less memory, more time. None: everything is kept."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """Fast-weight memories of a batch."""
    window_probability: float = 0.0
    """Probability, drawn once per step, that full-attention layers see `model.window` tokens only
    (the paper's pSWA). Two branches are compiled; evaluations see everything."""
    log_every: int = 10
    """Steps between two printed lines (not on a terminal) and TensorBoard events."""
    validate_every: int | None = None
    """Steps between two validations. None: only after the last step."""
    validation_batches: int = 4
    """Held-out batches per validation. 0: no validation."""

    def __post_init__(self) -> None:
        check_literals(self)
        for name in ("steps", "batch_size", "micro_batches", "loss_block", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if not 0 <= self.window_probability <= 1:
            raise ValueError(
                f"window_probability={self.window_probability} must lie between 0 and 1."
            )
        if self.validate_every is not None and self.validate_every < 1:
            raise ValueError(
                f"validate_every={self.validate_every} must be at least 1, or None for the end."
            )
        if self.validation_batches < 0:
            raise ValueError(
                f"validation_batches={self.validation_batches} is negative; 0 turns it off."
            )
        check_split(self.batch_size, micro_batches=self.micro_batches, memory=self.memory)
