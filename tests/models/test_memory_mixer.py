"""A mixer that only the memory reads: what it changes and what it leaves."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax import memories
from fwpkm_jax.config_json import from_json, to_json
from fwpkm_jax.generation import init_generation
from fwpkm_jax.interchange.hf.pytorch import unread_memory
from fwpkm_jax.layers.mixers import AttentionConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel
from tests.models.test_language_model import CONFIG

PLAIN = replace(CONFIG, mixers=("swa", "swa"), memory_layers=(1,), pkm_layers=())
MIXER = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4, rotary_fraction=0.5, window=3)
MODEL = replace(PLAIN, memory_mixer=MIXER)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, 8)), jnp.int32)


def build(config: ModelConfig) -> LanguageModel:
    return LanguageModel(config, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_without_the_memorys_output_the_model_is_the_one_without_both():
    model, plain = build(MODEL), build(PLAIN)
    for one in (model, plain):
        one.blocks[1].memory.out_proj.kernel[...] *= 0
    memory = model.init_memory(jax.random.key(0))
    # Drawn last of a layer, the mixer leaves the draws of that layer's other weights.
    nnx.update(model, nnx.state(plain))
    np.testing.assert_array_equal(
        model(TOKENS, memory).logits, plain(TOKENS, plain.init_memory(jax.random.key(0))).logits
    )


@pytest.mark.slow
def test_a_query_depends_on_the_words_in_the_window_and_on_no_other():
    """The layer below sees two tokens, the mixer three, so a query sees the last four."""
    model = build(replace(MODEL, window=2))
    memory = model.init_memory(jax.random.key(0))

    # One row as it is, then one for each place that has another token.
    rows = jnp.tile(TOKENS, (9, 1))
    places = jnp.arange(8)
    rows = rows.at[places + 1, places].set((rows[0] + 1) % CONFIG.vocab_size)
    info = nnx.jit(lambda model: model.hidden(rows, memory).info)(model)
    query = np.asarray(info["layer_1"].query)[:, -1]
    changed = [not np.array_equal(query[0], row) for row in query[1:]]
    assert changed == [False] * 4 + [True] * 4


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["all", "memory"])
def test_a_saved_memory_begins_with_an_empty_window_or_goes_on(tmp_path, keep):
    model = build(MODEL)
    memory = model.init_memory(jax.random.key(0))
    state = init_generation(model, memory, batch=1, max_length=8)
    read = model.stream(TOKENS, state.stream).stream
    state = state._replace(stream=read, num_read=state.num_read + 8)
    memories.save(tmp_path, "alice", state, model=model, keep=keep)
    loaded = memories.load(tmp_path, "alice", model, max_length=8)
    cache = loaded.stream.layers["layer_1"].memory_cache
    before = read.layers["layer_1"].memory_cache
    kept = jax.tree.map(np.array_equal, cache, before)
    assert all(jax.tree.leaves(kept)) == (keep == "all")
    if keep == "memory":
        assert (np.asarray(cache.positions) == -1).all()


@pytest.mark.slow
def test_caches_of_a_new_document_hold_no_word_of_the_one_before():
    model = build(MODEL)
    memory = model.init_memory(jax.random.key(0))
    start = model.init_stream(memory, batch=1, max_length=8)
    read = model.stream(TOKENS, start, write=False).stream
    again = model.reset_caches(read, pending=False)
    np.testing.assert_array_equal(
        model.stream(TOKENS, again).logits, model.stream(TOKENS, start).logits
    )


def test_what_has_no_effect_or_no_bound_is_refused():
    with pytest.raises(ValueError, match="memory_mixer needs memory_layers"):
        replace(MODEL, memory_layers=())
    with pytest.raises(ValueError, match="sees all tokens before; give it a window"):
        replace(MODEL, memory_mixer=replace(MIXER, window=None))
    assert unread_memory(MODEL, "qwen3") == "model.memory_mixer"


def test_a_config_file_keeps_it():
    assert from_json(to_json(MODEL), ModelConfig) == MODEL
    assert from_json(to_json(PLAIN), ModelConfig) == PLAIN
