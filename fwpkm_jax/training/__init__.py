"""Training: steps, checkpoints that resume bit for bit, run directories.

`train` runs a whole `Experiment`. Names are imported when they are first used, because a
configuration needs the small ones and training needs a configuration.
"""

from typing import TYPE_CHECKING

from fwpkm_jax.lazy_names import lazy_names

if TYPE_CHECKING:
    from fwpkm_jax.training.checkpoints.checkpoint import CheckpointConfig
    from fwpkm_jax.training.config import TrainingConfig
    from fwpkm_jax.training.loop import TrainResult, train
    from fwpkm_jax.training.optimizer import OptimizerConfig, make_optimizer
    from fwpkm_jax.training.state import MemoryConfig, TrainState, init_state
    from fwpkm_jax.training.step import make_train_step

__all__ = [
    "CheckpointConfig",
    "MemoryConfig",
    "OptimizerConfig",
    "TrainResult",
    "TrainState",
    "TrainingConfig",
    "init_state",
    "make_optimizer",
    "make_train_step",
    "train",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "fwpkm_jax.training.checkpoints.checkpoint": ("CheckpointConfig",),
        "fwpkm_jax.training.config": ("TrainingConfig",),
        "fwpkm_jax.training.loop": ("TrainResult", "train"),
        "fwpkm_jax.training.optimizer": ("OptimizerConfig", "make_optimizer"),
        "fwpkm_jax.training.state": ("MemoryConfig", "TrainState", "init_state"),
        "fwpkm_jax.training.step": ("make_train_step",),
    },
)
