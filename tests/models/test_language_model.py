"""The decoder: streams, causality, groups, padding, precision, invalid layouts."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers.attention import AttentionConfig
from fwpkm_jax.layers.mixers.gated_delta_net import GatedDeltaNetConfig
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.layers.pkm import PKMConfig
from fwpkm_jax.models.embedding_and_head import embed_over_devices
from fwpkm_jax.models.language_model import LanguageModel, ModelConfig
from fwpkm_jax.models.outputs import memory_metrics
from fwpkm_jax.rules import FwPKM

CONFIG = ModelConfig(
    vocab_size=17,
    model_dim=12,
    mixers=("gdn", "swa", "attention"),
    mlp_dim=16,
    memory_layers=(1, 2),
    pkm_layers=(1,),
    window=5,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, rotary_fraction=0.5),
    gdn=GatedDeltaNetConfig(
        num_key_heads=1, num_value_heads=2, key_head_dim=4, value_head_dim=4, chunk_size=4
    ),
    fast_weight=FastWeightConfig(
        rule=FwPKM(num_subkeys=6, key_dim=8, value_dim=6, top_k=3), chunk_size=4
    ),
    pkm=PKMConfig(num_subkeys=4, key_dim=4, value_dim=6, num_heads=2, top_k=2),
    init_std=0.3,  # Large enough for every part to matter in the logits.
    activation_dtype="float32",
)
BATCH, LENGTH = 2, 11


@functools.cache
def build(config=CONFIG):
    with jax.ensure_compile_time_eval():  # Also when a traced function asks first.
        return nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)))


@functools.partial(jax.jit, static_argnames=("config", "write"))
def whole(params, tokens, memory, mask=None, *, config=CONFIG, write=True):
    return nnx.merge(build(config)[0], params)(tokens, memory, mask=mask, write=write)


@functools.partial(jax.jit, static_argnames=("write",))
def piece(params, tokens, stream, *, write=True):
    return nnx.merge(build()[0], params).stream(tokens, stream, write=write)


@jax.jit
def flush(params, stream):
    return nnx.merge(build()[0], params).flush(stream)


def start(config=CONFIG, *, groups=1):
    model = nnx.merge(*build(config))
    init = jax.jit(lambda key: model.init_memory(key, groups=groups))
    return model, init(jax.random.key(1))


def tokens(seed=0, batch=BATCH, length=LENGTH):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, CONFIG.vocab_size)


@pytest.mark.thorough
def test_every_memory_layer_starts_from_a_draw_of_its_own():
    first, second = (np.asarray(memory.keys) for memory in start()[1].values())
    assert first.shape == second.shape
    assert not np.any(first == second)


def assert_close(actual, expected, tolerance=2e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        actual,
        expected,
    )


def read(tokens, stream, keep):
    return start()[0].stream(tokens, stream, logits_to_keep=keep)


@pytest.mark.slow
def test_logits_that_are_kept_are_the_last_ones():
    model, memory = start()
    stream = model.init_stream(memory, batch=BATCH, max_length=LENGTH)
    every, kept = (jax.jit(read, static_argnums=2)(tokens(), stream, n) for n in (None, 2))
    assert_close(kept.logits, every.logits[:, -2:])
    assert_close(kept.stream, every.stream)


@pytest.mark.slow
def test_logits_of_the_tokens_that_are_kept_alone_are_computed():
    model, memory = start()
    stream = model.init_stream(memory, batch=BATCH, max_length=LENGTH)
    shape = f"[{BATCH},{LENGTH},{CONFIG.vocab_size}]"
    programs = [str(jax.make_jaxpr(read, static_argnums=2)(tokens(), stream, n)) for n in (None, 2)]
    assert [shape in program for program in programs] == [True, False]
    with pytest.raises(ValueError, match="logits_to_keep=0 must be at least 1"):
        model.stream(tokens(), stream, logits_to_keep=0)


@pytest.mark.slow
def test_with_a_frozen_memory_stream_and_whole_pass_agree():
    model, memory = start()
    params = build()[1]
    out = whole(params, tokens(), memory, write=False)
    stream = model.init_stream(memory, batch=BATCH, max_length=LENGTH)
    streamed = piece(params, tokens(), stream, write=False)
    assert_close(streamed.logits, out.logits)
    jax.tree.map(np.testing.assert_array_equal, streamed.stream.memory, memory)
    jax.tree.map(np.testing.assert_array_equal, out.memory, memory)


@pytest.mark.slow
def test_writing_changes_memories_and_later_logits_only():
    _, memory = start()
    params = build()[1]
    written = whole(params, tokens(), memory)
    frozen = whole(params, tokens(), memory, write=False)
    chunk = CONFIG.fast_weight.chunk_size
    assert_close(written.logits[:, :chunk], frozen.logits[:, :chunk], 1e-6)
    assert np.max(np.abs(written.logits[:, chunk:] - frozen.logits[:, chunk:])) > 1e-3
    for name in memory:
        assert np.any(np.asarray(written.memory[name].values) != memory[name].values)


@pytest.mark.thorough
@pytest.mark.parametrize("position", [0, 5, LENGTH - 1])
def test_a_token_changes_no_earlier_logits(position):
    _, memory = start()
    params = build()[1]
    changed = tokens().at[:, position].add(1) % CONFIG.vocab_size
    before, after = (whole(params, ids, memory).logits for ids in (tokens(), changed))
    np.testing.assert_array_equal(before[:, :position], after[:, :position])
    assert np.any(before[:, position] != after[:, position])


@pytest.mark.slow
def test_groups_do_not_see_each_other():
    _, memory = start(groups=2)
    params = build()[1]
    changed = tokens().at[1].add(1) % CONFIG.vocab_size
    one, two = (whole(params, ids, memory) for ids in (tokens(), changed))
    np.testing.assert_array_equal(one.logits[0], two.logits[0])
    first = lambda tree: jax.tree.map(lambda x: x[0], tree)  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, first(one.memory), first(two.memory))
    # In one group they do.
    _, shared = start(groups=1)
    one, two = (whole(params, ids, shared) for ids in (tokens(), changed))
    assert np.any(one.logits[0] != two.logits[0])


@pytest.mark.slow
def test_a_group_of_its_own_is_a_batch_of_its_own():
    _, memory = start(groups=2)
    _, single = start(groups=1)
    params = build()[1]
    together = whole(params, tokens(), memory)
    alone = whole(params, tokens()[1:], single)
    assert_close(together.logits[1:], alone.logits)


@pytest.mark.slow
def test_padding_behind_changes_neither_real_logits_nor_memories():
    _, memory = start()
    params = build()[1]
    real = 5  # The first chunk is full, the second has one token, the last none.
    mask = (jnp.arange(LENGTH) < real).astype(jnp.float32)
    mask = jnp.broadcast_to(mask, (BATCH, LENGTH))
    other = tokens().at[:, real:].add(3) % CONFIG.vocab_size
    one, two = (whole(params, ids, memory, mask) for ids in (tokens(), other))
    np.testing.assert_array_equal(one.logits[:, :real], two.logits[:, :real])
    jax.tree.map(np.testing.assert_array_equal, one.memory, two.memory)
    unpadded = whole(params, tokens()[:, :real], memory)
    assert_close(one.logits[:, :real], unpadded.logits)
    assert_close(one.memory, unpadded.memory)


@pytest.mark.slow_cases("bfloat16")
@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_every_gradient_is_finite_and_memories_stay_float32(dtype):
    config = replace(CONFIG, activation_dtype=dtype, memory_layers=(1,))
    model, memory = start(config)
    graphdef, params = nnx.split(model)

    @jax.jit
    def gradients(params):
        def loss(params):
            out = nnx.merge(graphdef, params)(tokens(), memory)
            chosen = jnp.take_along_axis(out.logits, tokens()[..., None], axis=-1)
            return jnp.mean(jax.nn.logsumexp(out.logits, axis=-1) - chosen[..., 0]), out.memory

        return jax.grad(loss, has_aux=True)(params)

    grads, written = gradients(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert np.all(np.isfinite(leaf)), jax.tree_util.keystr(path)
        assert np.any(np.asarray(leaf) != 0), f"{jax.tree_util.keystr(path)} learns nothing"
    same = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, written, memory)
    assert all(jax.tree.leaves(same))


@pytest.mark.slow
def test_a_flush_writes_what_waits_and_a_reset_starts_over():
    model, memory = start()
    params = build()[1]
    few = tokens(length=CONFIG.fast_weight.chunk_size)  # One short of a complete chunk.
    stream = model.init_stream(memory, batch=BATCH, max_length=LENGTH)
    out = piece(params, few, stream)
    jax.tree.map(np.testing.assert_array_equal, out.stream.memory, memory)
    flushed = flush(params, out.stream)
    assert np.any(np.asarray(flushed.memory["layer_1"].values) != memory["layer_1"].values)
    again = model.reset_caches(flushed, pending=True)
    fresh = model.init_stream(flushed.memory, batch=BATCH, max_length=LENGTH)
    assert_close(piece(params, few, again).logits, piece(params, few, fresh).logits, 1e-6)


@pytest.mark.thorough
def test_an_id_outside_the_vocabulary_is_not_read_as_another():
    _, memory = start()
    ids = tokens().at[0, 3].set(CONFIG.vocab_size)
    logits = whole(build()[1], ids, memory).logits
    assert np.all(np.isnan(logits[0, 3]))
    axes = ("data", "fsdp", "model")
    types = (jax.sharding.AxisType.Auto,) * 3
    partition = Partition(jax.make_mesh((1, 1, 1), axes, types, devices=jax.devices()[:1]))
    rows = embed_over_devices(jnp.ones((CONFIG.vocab_size, 2)), ids, None, partition)
    np.testing.assert_array_equal(np.argwhere(np.isnan(rows[..., 0])), [[0, 3]])


def test_metrics_name_layer_and_measure():
    _, memory = start()
    metrics = memory_metrics(whole(build()[1], tokens(), memory).info)
    measures = ("memory_loss", "addressing_loss", "gate_mean", "collision", "coverage", "kld")
    assert set(metrics) == {f"layer_{i}/{m}" for i in (1, 2) for m in measures}
    assert all(np.isfinite(value) for value in metrics.values())


def test_a_memory_of_another_model_is_refused():
    model, memory = start()
    with pytest.raises(ValueError, match=r"holds \['layer_1'\].*\['layer_1', 'layer_2'\]"):
        model(tokens(), {"layer_1": memory["layer_1"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_layers": (3,)}, r"memory_layers=\(3,\) must be distinct layers between 0 and 2"),
        ({"pkm_layers": (1, 1)}, r"pkm_layers=\(1, 1\) must be distinct"),
        ({"mixers": ()}, r"mixers=\(\) must name at least one"),
        ({"model_dim": 0}, "model_dim=0 is too small; use 1"),
        ({"head_init_std": 0.1}, "head_init_std=0.1 has no effect with tie_embeddings=True"),
    ],
)
def test_layouts_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)


@pytest.mark.slow
def test_a_mask_of_any_numbers_is_taken():
    """Of the decoder, with a memory, PKM and every kind of mixer in it."""
    params = build()[1]
    memory = nnx.merge(build()[0], params).init_memory(jax.random.key(1))
    tokens = jnp.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % CONFIG.vocab_size
    mask = np.ones((BATCH, LENGTH))
    mask[1, :4] = 0
    expected = whole(params, tokens, memory, jnp.asarray(mask, jnp.float32))
    for dtype in (jnp.int32, bool):
        found = whole(params, tokens, memory, jnp.asarray(mask, dtype))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
