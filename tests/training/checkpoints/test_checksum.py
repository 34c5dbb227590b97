"""A checksum changes with any bit and not with the layout."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.training.checkpoints import checksum as checksum_module
from fwpkm_jax.training.checkpoints.checksum import checksum, checksums, non_finite_leaves


def mixed(word):
    """MurmurHash3's finalizer, in 64-bit numbers that are cut to 32."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ (word >> shift)) * factor % 2**32
    return word ^ (word >> 16)


def written_out(words):
    words = words.astype(np.uint64)
    places = np.arange(1, words.size + 1, dtype=np.uint64)
    return int(np.sum(mixed((words + mixed(places)) % 2**32)) % 2**32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_checksum_is_the_sum_written_out(dtype):
    values = jnp.asarray(np.random.default_rng(0).integers(0, 2, (3, 5)), dtype)
    words = np.asarray(values).reshape(-1)
    words = words.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[words.itemsize])
    assert int(checksum(values)) == written_out(words)


@pytest.mark.by_default("bfloat16", thorough=[])
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64"])
def test_a_large_array_is_summed_in_pieces(dtype):
    size, large = 2**20 + 7, jnp.dtype(dtype).itemsize == 8
    values = np.random.default_rng(0).integers(0, 256, (size, jnp.dtype(dtype).itemsize), np.uint8)
    values = values.reshape(-1).view(jnp.dtype(dtype))
    words = values.view({1: np.uint8, 2: np.uint16}.get(values.itemsize, np.uint32))
    expected = written_out(words)
    with jax.enable_x64(large):
        array = jax.device_put(values.reshape(size, 1))
        assert checksums({"a": array}) == {"a": expected}


def test_a_large_array_is_free_again_after_its_checksum():
    checksum_module._checksum_of_piece.clear_cache()  # The call that compiles keeps its arguments.
    array = np.ones(2**20 + 7, np.float32)
    held = weakref.ref(array)
    checksums({"a": array})
    del array
    assert held() is None


@pytest.mark.thorough("float32")
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.float64])
def test_any_flipped_bit_changes_the_checksum(dtype):
    with jax.enable_x64(np.dtype(dtype).itemsize == 8):
        values = np.random.default_rng(0).integers(1, 9, 6).astype(dtype)
        whole = int(checksum(jnp.asarray(values)))
        for byte in range(values.nbytes):
            for bit in range(8):
                damaged = values.copy()
                damaged.view(np.uint8)[byte] ^= 1 << bit
                assert int(checksum(jnp.asarray(damaged))) != whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32"])
@pytest.mark.parametrize("size", [64, 2**20 + 8])
def test_the_same_change_of_several_values_is_seen(dtype, size):
    """All signs, an even number of them, one bit of every value, rows that are swapped."""
    with jax.enable_x64("64" in dtype):
        values = np.random.default_rng(0).normal(size=(size // 4, 4)) * 100
        values = np.asarray(values).astype(jnp.dtype(dtype))
        changed = {"signs": -values}
        for name, rows in (("two", [3, 9]), ("neighbours", [5, 6]), ("far", [0, size // 4 - 1])):
            changed[name] = values.copy()
            changed[name][rows] *= -1
        bits = values.view(np.uint8).copy()
        bits[..., 0] ^= 4
        changed["bit"] = bits.view(values.dtype).reshape(values.shape)
        changed["swapped"] = np.roll(values, 1, axis=0)
        changed["rows of a pair"] = values.reshape(-1, 2, 4)[:, ::-1].reshape(values.shape)
        sums = {name: checksums({"": x})[""] for name, x in changed.items()}
        assert checksums({"": values})[""] not in sums.values(), sums


def test_swapped_values_change_the_checksum():
    assert int(checksum(jnp.array([1.0, 2.0]))) != int(checksum(jnp.array([2.0, 1.0])))


def test_checksum_does_not_depend_on_the_number_of_devices():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    values = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    assert checksums({"a": jax.device_put(values, sharding)}) == checksums({"a": values})


def test_random_keys_have_a_checksum():
    assert checksums({"rng": jax.random.key(0)}) != checksums({"rng": jax.random.key(1)})


def test_non_finite_arrays_are_named_in_order():
    tree = {
        "b": {"c": jnp.array([1.0, jnp.inf])},
        "a": jnp.array(jnp.nan),
        "ids": jnp.arange(3),
        "fine": jnp.ones(2),
    }
    assert non_finite_leaves(tree) == ["a", "b/c"]
