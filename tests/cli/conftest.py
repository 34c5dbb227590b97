"""An untrained run on text, shared by the commands that need one."""

import pytest
from flax import nnx

from fwpkm_jax.config import Experiment
from fwpkm_jax.data import TextData
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.run import Run
from tests.evaluation.conftest import tiny_model_config

# The table has more rows than bytes have ids.
MODEL = tiny_model_config(mixers=("swa",), memory_layers=(0,), vocab_size=300)


@pytest.fixture(scope="session")
def text_run():
    """A model with two memory groups that has read nothing."""
    model = LanguageModel(MODEL, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    experiment = Experiment(model=MODEL, data=TextData(train_paths=("text.txt",)))
    memory = model.init_memory(nnx.Rngs(1).params(), groups=2)
    return Run(experiment, graphdef, params, memory, step=0)
