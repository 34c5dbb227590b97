"""A tiny untrained model whose memory's reads show in the logits."""

from dataclasses import replace

import jax
import pytest
from flax import nnx

from fwpkm_jax.evaluation import Subject
from fwpkm_jax.models.language_model import LanguageModel
from tests.evaluation.conftest import tiny_model_config


def make_subject(*, rule=None, **changes) -> Subject:
    """Small enough that every path compiles within a second; 24 tokens, chunks of 8."""
    config = tiny_model_config(
        **{"vocab_size": 24, "mixers": ("swa",), "memory_layers": (0,)} | changes
    )
    if rule is not None:
        config = replace(config, fast_weight=replace(config.fast_weight, rule=rule))
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    memory = model.init_memory(jax.random.key(1)) if config.memory_layers else {}
    return Subject(model=model, memory=memory)


@pytest.fixture(scope="session")
def subject() -> Subject:
    return make_subject()
