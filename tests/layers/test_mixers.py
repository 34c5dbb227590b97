"""What every token mixer owes its callers, whatever it computes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from fwpkm_jax.layers.attention import Attention, AttentionConfig
from fwpkm_jax.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig

MODEL_DIM = 6
ATTENTION = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "rotary_fraction": 0.5}
GDN = {"num_key_heads": 1, "num_value_heads": 2, "key_head_dim": 4, "value_head_dim": 3}
MIXERS = {
    "attention": (Attention, AttentionConfig(**ATTENTION)),
    "window": (Attention, AttentionConfig(**ATTENTION, window=3)),
    "gdn": (GatedDeltaNet, GatedDeltaNetConfig(**GDN, chunk_size=4)),
}
few = settings(max_examples=5, deadline=None, derandomize=True)


def make(name, dtype=None):
    mixer, config = MIXERS[name]
    return mixer(config, MODEL_DIM, norm_eps=1e-5, init_std=0.5, dtype=dtype, rngs=nnx.Rngs(0))


def sample(length, seed=0, batch=2, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, length, MODEL_DIM)), dtype)


def in_pieces(mixer, x, lengths, mask=None):
    """Outputs joined, and the last cache, of a stream cut into pieces of these lengths."""
    cache, outputs, start = mixer.init_cache(len(x), max_length=32, dtype=x.dtype), [], 0
    for length in lengths:
        piece = slice(start, start + length)
        piece_mask = None if mask is None else mask[:, piece]
        output, cache = mixer(x[:, piece], mask=piece_mask, cache=cache)
        outputs.append(output)
        start += length
    return jnp.concatenate(outputs, axis=1), cache


@pytest.mark.parametrize("name", MIXERS)
@few
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_stream_cut_anywhere_equals_the_whole(name, lengths, seed):
    with jax.enable_x64(True):
        mixer, x = make(name), sample(sum(lengths), seed)

        @jax.jit
        def run(x):
            return mixer(x)[0], in_pieces(mixer, x, lengths), in_pieces(mixer, x, [x.shape[1]])

        whole, (pieces, cache), (at_once, same_cache) = run(x)
        assert mixer(x[:, :1])[1] is None
        chex.assert_trees_all_close([pieces, at_once], [whole, whole], rtol=1e-9, atol=1e-11)
        chex.assert_trees_all_close(cache, same_cache, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", MIXERS)
@few
@given(data=st.data(), seed=st.integers(0, 99))
def test_padding_anywhere_changes_no_token_and_no_cache(name, data, seed):
    """Each sequence of the batch, padded differently, gives what it gives alone and unpadded."""
    mask = np.array(
        data.draw(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=2, max_size=2))
    )
    mask[:, data.draw(st.integers(0, 8))] = True  # At least one real token each.
    cut = data.draw(st.integers(1, 8))
    with jax.enable_x64(True):
        mixer, x = make(name), sample(9, seed)
        given_mask = jnp.asarray(mask, data.draw(st.sampled_from([bool, np.float64])))

        @jax.jit
        def run(x, mask):
            # Values at padding must not matter either.
            x = jnp.where(mask[:, :, None] != 0, x, 1e3)
            return mixer(x, mask=mask)[0], in_pieces(mixer, x, [cut, 9 - cut], mask)

        whole, (pieces, cache) = run(x, given_mask)
        assert np.all(np.isfinite(whole))
        np.testing.assert_allclose(pieces, whole, rtol=1e-9, atol=1e-11)
        np.testing.assert_array_equal(np.asarray(whole)[~mask], 0)
        for row in range(2):
            alone = x[row : row + 1, np.flatnonzero(mask[row])]
            expected, last = in_pieces(mixer, alone, [alone.shape[1]])
            np.testing.assert_allclose(whole[row, mask[row]], expected[0], rtol=1e-9, atol=1e-11)
            own = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], cache)
            chex.assert_trees_all_close(own, last, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", MIXERS)
def test_a_sequence_of_padding_alone_gives_zeros_and_keeps_the_cache(name):
    mixer, x = make(name), sample(4, dtype=np.float32)
    _, cache = mixer(x, cache=mixer.init_cache(2, max_length=8, dtype=x.dtype))
    output, same = mixer(x, mask=jnp.zeros((2, 4)), cache=cache)
    np.testing.assert_array_equal(output, 0)
    chex.assert_trees_all_equal(same, cache)


@pytest.mark.parametrize("name", MIXERS)
def test_later_tokens_do_not_reach_earlier_outputs(name):
    with jax.enable_x64(True):
        mixer, x = make(name), sample(11)
        changed = x.at[:, 7:].add(1)
        run = jax.jit(lambda x: mixer(x)[0])
        before, after = run(x), run(changed)
        np.testing.assert_allclose(before[:, :7], after[:, :7], rtol=1e-12)
        assert np.min(np.max(np.abs(before - after), axis=(0, 2))[7:]) > 1e-4


@pytest.mark.parametrize("name", MIXERS)
def test_sequences_of_a_batch_are_independent(name):
    with jax.enable_x64(True):
        mixer, x = make(name), sample(8, batch=3)
        alone = mixer(x[1:2])[0]
        np.testing.assert_allclose(mixer(x)[0][1:2], alone, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", MIXERS)
def test_jit_equals_eager(name):
    mixer, x = make(name), sample(8, dtype=np.float32)
    eager, jitted = mixer(x)[0], jax.jit(lambda x: mixer(x)[0])(x)
    np.testing.assert_allclose(eager, jitted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MIXERS)
def test_bfloat16_activations_have_finite_gradients(name):
    mixer, x = make(name, jnp.bfloat16), sample(9, dtype=jnp.bfloat16)
    graphdef, params = nnx.split(mixer)
    mask = jnp.ones((2, 9)).at[1].set(0)

    @jax.jit
    def gradients(params, x):
        def loss(params, x):
            mixer = nnx.merge(graphdef, params)
            output, _ = mixer(x, mask=mask)
            assert output.dtype == jnp.bfloat16
            return jnp.sum(jnp.square(output.astype(jnp.float32)))

        return jax.grad(loss, argnums=(0, 1))(params, x)

    d_params, d_x = gradients(params, x)
    chex.assert_type(jax.tree.leaves(d_params), jnp.float32)
    chex.assert_tree_all_finite([jax.tree.leaves(d_params), d_x])
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(d_params))


@pytest.mark.parametrize("name", MIXERS)
def test_bfloat16_stream_keeps_its_dtypes(name):
    mixer, x = make(name, jnp.bfloat16), sample(3, dtype=jnp.bfloat16)
    cache = mixer.init_cache(2, max_length=8, dtype=jnp.bfloat16)
    output, after = mixer(x, cache=cache)
    assert output.dtype == jnp.bfloat16
    chex.assert_trees_all_equal_shapes_and_dtypes(after, cache)
