"""Fast-weight memories for language models in JAX.

- Choose a memory: `FwPKM`, `FwMLP`, `LaCTRule`, `TitansRule`; more in `fwpkm_jax.rules`.
- Add your own: `register_rule`, `register_mixer`; `check_rule` and `check_mixer` test them.
- Put it into a model of your own: `FastWeight`, `FastWeightConfig`; more in `fwpkm_jax.layers`.
- Build a decoder with memories: `LanguageModel`, `ModelConfig`.
- Describe a training run: `Experiment`, with `TextData` or `RecallData`, `OptimizerConfig`,
  `TrainingConfig` and `MemoryConfig`; `load_config` gives a shipped one.
- Train: `train` an `Experiment`; `fit` is the loop for a step function of your own.
- Open a trained run, evaluate it, continue a text: `load_run`, `evaluate`, `continue_text`.
- Generate with a model: `init_generation`, `generate`, `Sampling`.

Weights leave and come in through `fwpkm_jax.interchange`; `fwpkm_jax.training` has the parts of
training, `fwpkm_jax.evaluation` the evaluations.

Names are imported when they are first used, so that `import fwpkm_jax` takes no time.
"""

from typing import TYPE_CHECKING

from fwpkm_jax.lazy_imports import lazy_names

if TYPE_CHECKING:
    from fwpkm_jax.config import Experiment, load_config
    from fwpkm_jax.data import RecallData, TextData
    from fwpkm_jax.generation import Sampling, generate, init_generation
    from fwpkm_jax.layers.memories.fast_weight import FastWeight, FastWeightConfig
    from fwpkm_jax.layers.mixers.registry import register_mixer
    from fwpkm_jax.models.config import ModelConfig
    from fwpkm_jax.models.language_model import LanguageModel
    from fwpkm_jax.rules import FwMLP, FwPKM, LaCTRule, TitansRule, register_rule
    from fwpkm_jax.run.continue_text import continue_text
    from fwpkm_jax.run.evaluate import evaluate
    from fwpkm_jax.run.load import load_run
    from fwpkm_jax.run.train import train
    from fwpkm_jax.testing import check_mixer, check_rule
    from fwpkm_jax.training.fit import fit
    from fwpkm_jax.training.optimizer import OptimizerConfig
    from fwpkm_jax.training.state import MemoryConfig
    from fwpkm_jax.training.training_config import TrainingConfig

__version__ = "0.1.0"

__all__ = [
    "Experiment",
    "FastWeight",
    "FastWeightConfig",
    "FwMLP",
    "FwPKM",
    "LaCTRule",
    "LanguageModel",
    "MemoryConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RecallData",
    "Sampling",
    "TextData",
    "TitansRule",
    "TrainingConfig",
    "__version__",
    "check_mixer",
    "check_rule",
    "continue_text",
    "evaluate",
    "fit",
    "generate",
    "init_generation",
    "load_config",
    "load_run",
    "register_mixer",
    "register_rule",
    "train",
]

__getattr__, __dir__ = lazy_names(__name__, __file__)
