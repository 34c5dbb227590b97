"""Length of a run, its batches and memories, and the settings that do not change its results."""

from dataclasses import dataclass, field
from typing import Literal

from fwpkm_jax.literals import Count, Natural, Share, check_fields
from fwpkm_jax.models.remat import Remat
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
)
"""Settings that do not change what training computes: output paths, checkpoints, reports,
devices and processes. Other devices change results by rounding only."""

LogName = Literal["tensorboard", "wandb"]
"""Services that metrics can be sent to."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length of the run, its batches and its memories.

    Example:
      >>> from fwpkm_jax import TrainingConfig
      >>> TrainingConfig(steps=600, batch_size=16, micro_batches=2).batch_size
      16
    """

    steps: Count = 1000
    """Training steps in total. To continue a finished run, increase it."""
    batch_size: Count = 8
    """Sequences per step."""
    micro_batches: Count = 1
    """Pieces of a batch, processed one after the other to save memory."""
    loss_block: Count = 2048
    """Tokens whose logits are in memory at once in the training loss; fewer take less memory."""
    remat: Remat | None = None
    """Rematerialisation: less memory, more time. block: the backward pass computes each layer's
    activations again, except those of its fast-weight memory. dots: except also results of linear
    maps. names: except the mixer's output and the MLP's products. offload: likewise, and these wait
    in the host's memory (GPUs and TPUs). None: all activations are kept."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """How many fast-weight memories a batch has, and how long they live."""
    window_probability: Share = 0.0
    """Probability that full-attention layers see only `model.window` tokens in a step (the paper's
    pSWA); one draw per step. Above 0, two branches are compiled. Evaluations use full attention."""
    log_every: Count = 10
    """Steps between two TensorBoard events, and between two printed lines. On a terminal the status
    line shows every step."""
    validate_every: Count | None = None
    """Steps between two validations. None: only after the last step."""
    validation_batches: Natural = 4
    """Held-out batches per validation. 0: no validation."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_split(self.batch_size, micro_batches=self.micro_batches, memory=self.memory)
