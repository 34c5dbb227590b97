"""Tiny models and states for tests of saved memories, filled with numbers without a computation."""

import dataclasses

import jax
import numpy as np
from flax import nnx

from fwpkm_jax.generation import init_generation
from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayerConfig
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers import LaCTConfig, TitansConfig
from fwpkm_jax.layers.mixers.registry import mixer_names
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.models.outputs import StreamDocument
from fwpkm_jax.rules import FwPKM, make_rule
from tests.models.test_language_model import CONFIG

RULE = FwPKM(num_subkeys=12, key_dim=8, value_dim=6, top_k=3)
ONE = dataclasses.replace(
    CONFIG,
    mixers=("attention",),
    memory_layers=(0,),
    pkm_layers=(),
    fast_weight=FastWeightConfig(rule=RULE, chunk_size=4),
)
EVERY = dataclasses.replace(
    ONE,
    mixers=mixer_names(),
    fast_weight_layer=FastWeightLayerConfig(),
    lact=LaCTConfig(num_heads=2, num_fast_heads=1, hidden_dim=4, chunk_size=3, window=4),
    titans=TitansConfig(
        num_heads=1, head_dim=CONFIG.model_dim, depth=1, residual_norm=False, num_persistent=2
    ),
)


def with_rule(name):
    """The model of one layer with a registered rule."""
    rule = type(make_rule(name)).tiny()
    return dataclasses.replace(ONE, fast_weight=FastWeightConfig(rule=rule, chunk_size=4))


def filled(tree, seed):
    """Arrays of the tree's shapes and dtypes with arbitrary numbers."""
    rng = np.random.default_rng(seed)

    def fill(x):
        if jax.numpy.issubdtype(x.dtype, np.floating):
            return rng.normal(size=x.shape).astype(x.dtype)
        return rng.integers(0, 2, x.shape).astype(x.dtype)

    return jax.tree.map(fill, tree)


def make_model(config, seed=0):
    """A model with arbitrary slow weights."""
    abstract = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(abstract)
    return nnx.merge(graphdef, jax.tree.map(jax.numpy.asarray, filled(params, seed)))


def make_state(model, *, batch=2, groups=1, max_length=8, documents=False, seed=1):
    """A state with arbitrary numbers."""

    def start():
        memory = model.init_memory(jax.random.key(0), groups=groups)
        state = init_generation(model, memory, batch=batch, max_length=max_length)
        if not documents:
            return state
        document = StreamDocument(state.num_read, state.num_read)
        return state._replace(stream=state.stream._replace(document=document))

    return filled(jax.eval_shape(start), seed)
