"""Packing of real tokens to the front of their sequences."""

import jax.numpy as jnp
import numpy as np

from fwpkm_jax.core.padding import last_rows, pack, pack_tokens, unpack

MASK = np.array([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]])


def test_pack_puts_real_tokens_first_in_order_and_unpack_returns_them():
    x = np.arange(1, 41, dtype=np.float32).reshape(4, 5, 2)
    packing = pack_tokens(jnp.asarray(MASK, jnp.float32))
    packed = np.asarray(pack(jnp.asarray(x), packing))
    np.testing.assert_array_equal(packing.counts, MASK.sum(axis=1))
    for row, mask, tokens in zip(packed, MASK, x, strict=True):
        real = tokens[mask == 1]
        np.testing.assert_array_equal(row[: len(real)], real)
        np.testing.assert_array_equal(row[len(real) :], 0)
    unpacked = unpack(jnp.asarray(packed), packing)
    np.testing.assert_array_equal(unpacked, x * MASK[:, :, None])


def test_a_boolean_mask_packs_like_a_float_one():
    for actual, expected in zip(
        pack_tokens(jnp.asarray(MASK, bool)),
        pack_tokens(jnp.asarray(MASK, jnp.float32)),
        strict=True,
    ):
        np.testing.assert_array_equal(actual, expected)


def test_last_rows_end_where_each_sequence_ends():
    x = jnp.arange(12).reshape(2, 6)
    np.testing.assert_array_equal(last_rows(x, size=2, end=None), [[4, 5], [10, 11]])
    ends = jnp.asarray([3, 6])
    np.testing.assert_array_equal(last_rows(x, size=2, end=ends), [[1, 2], [10, 11]])
    assert last_rows(x, size=0, end=None).shape == (2, 0)
