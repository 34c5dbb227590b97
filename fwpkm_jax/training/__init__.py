"""Training: steps, checkpoints that resume bit for bit, run directories.

`fwpkm_jax.training.fit.fit` is the loop, for any step function; `fwpkm_jax.run.train.train` runs a
whole `Experiment` with it. Names are imported when they are first used, because a configuration
needs only the small ones.
"""

from typing import TYPE_CHECKING

from fwpkm_jax.lazy_imports import lazy_names

if TYPE_CHECKING:
    from fwpkm_jax.training.checkpoints.checkpoint import CheckpointConfig
    from fwpkm_jax.training.fit import FitResult, Hooks, Report
    from fwpkm_jax.training.optimizer import OptimizerConfig, make_optimizer
    from fwpkm_jax.training.state import MemoryConfig, TrainState, init_state
    from fwpkm_jax.training.step import make_train_step
    from fwpkm_jax.training.training_config import TrainingConfig

__all__ = [
    "CheckpointConfig",
    "FitResult",
    "Hooks",
    "MemoryConfig",
    "OptimizerConfig",
    "Report",
    "TrainState",
    "TrainingConfig",
    "init_state",
    "make_optimizer",
    "make_train_step",
]

__getattr__, __dir__ = lazy_names(__name__, __file__)
