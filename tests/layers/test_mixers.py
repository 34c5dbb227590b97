"""What every token mixer owes its callers, whatever it computes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from fwpkm_jax.layers.mixers import (
    AttentionConfig,
    GatedDeltaNetConfig,
    LaCTConfig,
    TitansConfig,
    TitansMixerConfig,
)

MODEL_DIM = 6
ATTENTION = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "rotary_fraction": 0.5}
GDN = {"num_key_heads": 1, "num_value_heads": 2, "key_head_dim": 4, "value_head_dim": 3}
# A learned step is small; 0.5 makes what is written show.
LACT = {"num_heads": 3, "num_fast_heads": 2, "hidden_dim": 4, "chunk_size": 3, "window": 2}
LACT |= {"low_rank": 2, "base_rate": 0.5}
TITANS = {"num_heads": 2, "head_dim": 3, "write_size": 2, "chunk_size": 4, "max_rate": 1.0}
TITANS |= {"momentum_order": 2, "combine_momenta": True, "tensor_rates": True, "qk_norm": True}
TITANS |= {"pooling": "attention", "output_norm": True}
WIRED = {"num_heads": 1, "head_dim": 6, "depth": 1, "residual_norm": False, "max_rate": 0.5}


def wired(wiring, *, window=None, **options):
    attention = AttentionConfig(**ATTENTION, window=window)
    memory = TitansConfig(**WIRED, **options)
    return TitansMixerConfig(wiring=wiring, memory=memory, attention=attention)


MIXERS = {
    "attention": AttentionConfig(**ATTENTION),
    "window": AttentionConfig(**ATTENTION, window=3),
    "gdn": GatedDeltaNetConfig(**GDN, chunk_size=4),
    "lact": LaCTConfig(**LACT),
    "titans": TitansMixerConfig(wiring="alone", memory=TitansConfig(**TITANS)),
    "titans_mac": wired("mac", chunk_size=4, write_size=2, num_persistent=2),
    "titans_mag": wired("mag", chunk_size=5, num_persistent=3, window=3),
    "titans_mal": wired("mal", chunk_size=None, num_persistent=2, window=3),
}
# The wirings of Titans are seen by default in the decoder's tests, `tests/generation`.
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name.startswith("titans_") else name
    for name in MIXERS
]
# Piece lengths below, at and beyond what the convolution, the window and a chunk see. They are
# few, so that each compiles once for all examples.
PIECES = (1, 2, 3, 7)
LENGTH = 16
several = settings(max_examples=15, deadline=None, derandomize=True)


def make(name, dtype=None):
    options = {"norm_eps": 1e-5, "init_std": 0.5, "dtype": dtype}
    return MIXERS[name].build(MODEL_DIM, **options, rngs=nnx.Rngs(0))


@functools.cache
def compiled(name):
    """The mixer, and its call compiled once for every piece length."""
    mixer = make(name)
    return mixer, jax.jit(lambda x, mask, cache: mixer(x, mask=mask, cache=cache))


def sample(length, seed=0, batch=2, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, length, MODEL_DIM)), dtype)


def in_pieces(name, x, lengths, mask=None):
    """Outputs joined, and the last cache, of a stream cut into pieces of these lengths."""
    mixer, call = compiled(name)
    x, mask = np.asarray(x), None if mask is None else np.asarray(mask)  # Cut on the host.
    cache, outputs, start = mixer.init_cache(len(x), max_length=LENGTH, dtype=x.dtype), [], 0
    for length in lengths:
        piece = slice(start, start + length)
        output, cache = call(x[:, piece], None if mask is None else mask[:, piece], cache)
        outputs.append(output)
        start += length
    return np.concatenate(outputs, axis=1), cache


def assert_close(actual, expected):
    chex.assert_trees_all_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", MIXERS)
def test_parameters_share_no_buffer_so_that_they_can_be_donated(name):
    leaves = jax.tree.leaves(nnx.state(make(name), nnx.Param))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize("name", NAMES)
@several
@given(
    lengths=st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).filter(
        lambda lengths: sum(lengths) <= LENGTH
    ),
    seed=st.integers(0, 99),
)
def test_a_stream_cut_anywhere_equals_the_whole(name, lengths, seed):
    with jax.enable_x64(True):
        x, streamed = sample(LENGTH, seed), sum(lengths)
        whole, no_cache = compiled(name)[1](x, None, None)
        assert no_cache is None
        pieces, cache = in_pieces(name, x, lengths)
        assert_close(pieces, np.asarray(whole)[:, :streamed])
        assert_close(cache, in_pieces(name, x, [1] * streamed)[1])


@pytest.mark.parametrize("name", NAMES)
@several
@given(
    mask=st.lists(st.booleans(), min_size=2 * 9, max_size=2 * 9),
    cut=st.sampled_from([((9,), bool), ((2, 7), np.float64), ((7, 1, 1), np.float64)]),
    seed=st.integers(0, 99),
)
def test_padding_anywhere_changes_no_token_and_no_cache(name, mask, cut, seed):
    """Each sequence, padded in its own way, gives what its tokens give alone and unpadded."""
    lengths, mask_dtype = cut
    mask = np.array(mask).reshape(2, 9)
    with jax.enable_x64(True):
        # Values at padding must not matter either.
        x = np.where(mask[:, :, None], sample(9, seed), 1e3)
        given_mask = mask.astype(mask_dtype)
        whole = np.asarray(compiled(name)[1](x, given_mask, None)[0])
        np.testing.assert_array_equal(whole[~mask], 0)
        pieces, cache = in_pieces(name, x, lengths, given_mask)
        assert_close(pieces, whole)
        for row in range(2):
            if np.any(mask[row]):
                alone = x[row : row + 1, np.flatnonzero(mask[row])]
                expected, last = in_pieces(name, alone, [1] * alone.shape[1])
                assert_close(whole[row, mask[row]], expected[0])
                own = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], cache)
                assert_close(own, last)


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_of_padding_alone_gives_zeros_and_keeps_the_cache(name):
    x = sample(3, dtype=np.float32)
    _, cache = in_pieces(name, x, [3])
    output, same = compiled(name)[1](x, jnp.zeros((2, 3)), cache)
    np.testing.assert_array_equal(output, 0)
    chex.assert_trees_all_equal(same, cache)


@pytest.mark.parametrize("name", NAMES)
def test_later_tokens_do_not_reach_earlier_outputs(name):
    with jax.enable_x64(True):
        x, call = sample(LENGTH), compiled(name)[1]
        before, after = (call(x, None, None)[0] for x in (x, x.at[:, 7:].add(1)))
        np.testing.assert_allclose(before[:, :7], after[:, :7], rtol=1e-12)
        assert np.min(np.max(np.abs(before - after), axis=(0, 2))[7:]) > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_sequences_of_a_batch_are_independent(name):
    with jax.enable_x64(True):
        x, call = sample(LENGTH), compiled(name)[1]
        together, alone = call(x, None, None)[0], call(x[1:], None, None)[0]
        np.testing.assert_allclose(together[1:], alone, rtol=1e-11, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_jit_equals_eager(name):
    x, (mixer, call) = sample(7, dtype=np.float32), compiled(name)
    eager, jitted = mixer(x)[0], call(x, None, None)[0]
    np.testing.assert_allclose(eager, jitted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_stream_keeps_its_dtypes(name):
    mixer, x = make(name, jnp.bfloat16), sample(3, dtype=jnp.bfloat16)
    cache = mixer.init_cache(2, max_length=8, dtype=jnp.bfloat16)
    output, after = jax.jit(lambda x, cache: mixer(x, cache=cache))(x, cache)
    assert output.dtype == jnp.bfloat16
    chex.assert_trees_all_equal_shapes_and_dtypes(after, cache)
