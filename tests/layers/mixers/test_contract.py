"""Each mixer keeps the public contract, `fwpkm_jax.testing.check_mixer`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from fwpkm_jax.layers.mixers import (
    AttentionConfig,
    GatedDeltaNetConfig,
    InPlaceConfig,
    LaCTConfig,
    Titans,
    TitansConfig,
    TitansMixerConfig,
    mixer_config,
)
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMixerConfig
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.rules.matrix import MATRIX_RULES
from fwpkm_jax.testing import MIXER_PROPERTIES, check_mixer

ATTENTION = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "rotary_fraction": 0.5}
GDN = {"num_key_heads": 1, "num_value_heads": 2, "key_head_dim": 4, "value_head_dim": 3}
MATRIX = {"num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 4, "value_head_dim": 3}
# A learned step is small; 0.5 makes what is written show.
LACT = {"num_heads": 3, "num_fast_heads": 2, "hidden_dim": 4, "chunk_size": 3, "window": 2}
LACT |= {"low_rank": 2, "base_rate": 0.5}
TITANS = {"num_heads": 2, "head_dim": 3, "write_size": 2, "chunk_size": 4, "max_rate": 1.0}
TITANS |= {"momentum_order": 2, "combine_momenta": True, "tensor_rates": True, "qk_norm": True}
TITANS |= {"pooling": "attention", "output_norm": True}
TTT = {"num_heads": 2, "head_dim": 3, "depth": 1, "chunk_size": 4, "max_rate": 1.0}
TTT |= {"momentum_order": 0, "forgetting": False, "bias": True, "write_norm": False}
TTT |= {"average_steps": True, "norm_bias": True, "memory_norm_eps": 1e-6, "gelu": "tanh"}
DEEP = TTT | {"depth": 2}
WIRED = {"num_heads": 1, "head_dim": 6, "depth": 1, "residual_norm": False, "max_rate": 0.5}


def wired(variant, *, window=None, **options):
    attention = AttentionConfig(**ATTENTION, window=window)
    memory = TitansConfig(**WIRED, **options)
    return TitansMixerConfig(variant=variant, memory=memory, attention=attention)


MIXERS = {
    "attention": AttentionConfig(**ATTENTION),
    "window": AttentionConfig(**ATTENTION, window=3),
    "gdn": GatedDeltaNetConfig(**GDN, chunk_size=4),
    "lact": LaCTConfig(**LACT),
    "in_place_ttt": InPlaceConfig(hidden_dim=5, chunk_size=3, learning_rate=20.0),
    "titans": TitansMixerConfig(variant="alone", memory=TitansConfig(**TITANS)),
    "ttt_linear": TitansMixerConfig(variant="alone", memory=TitansConfig(**TTT)),
    "ttt_mlp": TitansMixerConfig(variant="alone", memory=TitansConfig(**DEEP)),
    "titans_mac": wired("mac", chunk_size=4, write_size=2, num_persistent=2),
    "titans_mag": wired("mag", chunk_size=5, num_persistent=3, window=3),
    "titans_mal": wired("mal", chunk_size=None, num_persistent=2, window=3),
}
# The variants of Titans are seen by default in the decoder's tests, `tests/generation`.
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name.startswith("titans_") else name
    for name in MIXERS
]


PACKED = "packed_documents_equal_separate_rows"
SINGLE = f"{PACKED}_in_single_precision"
"""Seen by default of the kinds in `tests/models/test_documents.py` and of `core.streams`."""
PACKED_MIXERS = MIXERS | {
    "titans_persistent": wired("alone", chunk_size=4, write_size=2, num_persistent=3),
    "titans_mal_persistent": wired("mal", chunk_size=3, num_persistent=5, window=3),
    "titans_mag_alone": wired("mag", chunk_size=3, window=3),
    "titans_mal_alone": wired("mal", chunk_size=4, write_size=2, window=3),
    "titans_mal_without_chunks": wired("mal", chunk_size=None, window=3),
}
FEW = ("attention", "window", "gdn", "lact", "titans", "titans_mac", "titans_mal_persistent")
"""Mixers whose packed documents CI reads; other variants and options of Titans are slow cases."""
PACKED_NAMES = [
    name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in PACKED_MIXERS
]


@pytest.mark.slow_cases("window")
@pytest.mark.thorough("window", "gdn", "titans")
@pytest.mark.parametrize("name", NAMES)
def test_a_mixer_keeps_its_contract(name):
    names = [p for p in MIXER_PROPERTIES if not p.startswith(PACKED)]
    check_mixer(MIXERS[name], properties=names)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lact", "titans"])
def test_pieces_and_padding_change_nothing_for_mixers_whose_contract_is_thorough(name):
    streams = (
        "stream_cut_anywhere_equals_the_whole",
        "padding_anywhere_changes_no_token_and_no_cache",
    )
    check_mixer(MIXERS[name], properties=streams)


@pytest.mark.slow_cases("titans_mac", "titans_mal_persistent", "titans")
@pytest.mark.thorough
@pytest.mark.parametrize("name", PACKED_NAMES)
def test_documents_of_a_row_read_as_in_rows_of_their_own(name):
    check_mixer(PACKED_MIXERS[name], properties=[PACKED])


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX_RULES)
def test_documents_of_a_matrix_memory_read_as_in_rows_of_their_own(name):
    rule = MATRIX_RULES[name](chunk_size=4)
    check_mixer(MatrixMixerConfig(rule=rule, decay_rank=2, **MATRIX), properties=[PACKED, SINGLE])


LARGE = {"num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 32, "value_head_dim": 32}
LARGE_MIXERS = {
    "attention": AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=32),
    "gdn": GatedDeltaNetConfig(**LARGE),
    "lact": LaCTConfig(num_heads=2, num_fast_heads=2, hidden_dim=32, chunk_size=32, window=32),
    **{name: MatrixMixerConfig(rule=rule(), **LARGE) for name, rule in MATRIX_RULES.items()},
}


@pytest.mark.slow
@pytest.mark.slow_cases("mesa", "mlstm")
@pytest.mark.parametrize("name", LARGE_MIXERS)
def test_a_large_batch_of_one_chunk_equals_its_sequences_alone(name):
    """Large products go through a library of XLA's that those of the other tests do not see."""
    config = LARGE_MIXERS[name]
    length = 64
    if isinstance(config, MatrixMixerConfig):  # Rules with decays per channel have shorter chunks.
        length = min(length, getattr(config.rule, "chunk_size", length))
    mixer = config.build(64, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (64, length, 64))
    alone = jax.jit(lambda x: jax.lax.map(lambda row: mixer(row[None])[0][0], x))(x)
    for _ in range(2):  # What unwritten memory holds differs from program to program.
        together = jax.jit(lambda x: mixer(x)[0])(x)
        difference = jnp.linalg.norm(together - alone) / jnp.linalg.norm(alone)
        assert difference < 1e-4, difference


@pytest.mark.slow
@pytest.mark.slow_cases("titans_mac", "titans_mal_persistent", "lact", "titans")
@pytest.mark.parametrize("name", PACKED_NAMES)
def test_documents_of_a_row_read_alike_in_single_precision(name):
    """With the default step sizes: those of the other tests amplify rounding."""
    config = PACKED_MIXERS[name]
    if isinstance(config, TitansMixerConfig):
        memory = dataclasses.replace(config.memory, max_rate=TitansConfig.max_rate)
        config = dataclasses.replace(config, memory=memory)
    check_mixer(config, properties=[SINGLE])


@pytest.mark.slow_cases("titans_mac")
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["titans_mac"])
def test_documents_that_end_in_the_first_half_of_a_chunk_are_read_at_half_its_width(
    name, monkeypatch
):
    monkeypatch.setattr("fwpkm_jax.layers.mixers.titans_pieces._NARROWED", 4)
    check_mixer(MIXERS[name], properties=[PACKED])


@pytest.mark.thorough
@pytest.mark.parametrize("packed", [False, True])
def test_padding_of_a_pass_over_a_mesh_is_skipped(packed):
    """As without a mesh; here it has one device, `tests/training/test_sharding.py` has several."""
    mixer = MIXERS["window"].build(6, norm_eps=1e-5, init_std=0.5, dtype=None, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 9, 6)), jnp.float32)
    mask = jnp.asarray(rng.uniform(size=(2, 9)) < 0.6)
    starts = jnp.asarray(rng.uniform(size=(2, 9)) < 0.4) if packed else None
    partition = Partition(Mesh(np.reshape(jax.devices()[0], (1, 1, 1)), ("data", "fsdp", "model")))

    @jax.jit
    def both(x):
        options = {"mask": mask, "starts": starts}
        return mixer(x, **options)[0], mixer(x, **options, partition=partition)[0]

    expected, found = both(x)
    assert np.any(np.asarray(expected) != 0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_test_time_training_has_titans_heads_and_its_own_writes():
    model = ModelConfig(titans=TitansConfig(num_heads=3, head_dim=8))
    for name, depth in (("ttt_linear", 1), ("ttt_mlp", 2)):
        memory = mixer_config(name, model).memory
        assert (memory.num_heads, memory.head_dim, memory.depth) == (3, 8, depth)
        layer = nnx.eval_shape(lambda memory=memory: Titans(memory, 24, rngs=nnx.Rngs(0)))
        assert layer.forget_proj is None
        assert layer.momentum_proj is None
        shapes = [bias.shape for bias in layer.biases]
        assert shapes == [(3, 32), (3, 8)][2 - depth :]
        assert layer.norm_bias.shape == (3, 8)
        assert layer.step_factor.shape == (16,)
        assert memory.max_rate == {1: 0.5, 2: 0.05}[depth]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_jit_equals_eager(name):
    mixer = MIXERS[name].build(6, norm_eps=1e-5, init_std=0.5, dtype=None, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 6)), jnp.float32)
    eager, jitted = mixer(x)[0], jax.jit(lambda x: mixer(x)[0])(x)
    np.testing.assert_allclose(eager, jitted, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_a_stream_of_ttt_keeps_the_mean_of_each_chunks_steps():
    """With learned factors, over the ends of two chunks; pieces that end inside and at them."""
    mixer = MIXERS["ttt_linear"].build(6, norm_eps=1e-5, init_std=0.5, dtype=None, rngs=nnx.Rngs(0))
    mixer.step_factor.set_value(jnp.asarray([0.3, -0.2, -2.0, 0.4], jnp.float32))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 11, 6)), jnp.float32)

    @jax.jit
    def both(x):
        cache, outputs = mixer.init_cache(2, max_length=11, dtype=x.dtype), []
        for start, end in ((0, 3), (3, 4), (4, 9), (9, 11)):
            y, cache = mixer(x[:, start:end], cache=cache)
            outputs.append(y)
        return jnp.concatenate(outputs, axis=1), mixer(x)[0]

    streamed, whole = both(x)
    np.testing.assert_allclose(streamed, whole, rtol=1e-4, atol=1e-5)
