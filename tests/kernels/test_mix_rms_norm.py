"""Norms of gated mixes under bfloat16 and in a memory layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax import FastWeight, FastWeightConfig, FwPKM
from fwpkm_jax.core.platform import compiled_for
from fwpkm_jax.layers.memories import fast_weight
from fwpkm_jax.layers.norms import RMSNorm, can_fold, normed_maps, normed_mix_map
from pallas_kernels import dispatch
from pallas_kernels.checks import relative_errors, results_of
from pallas_kernels.mix_rms_norm import mix_rms_norm, specs

SPEC = specs.MixSpec(name="here", batch=2, length=6, width=128)


@pytest.mark.thorough
def test_a_result_in_bfloat16_is_the_float32_one_rounded():
    arrays = specs.sample(SPEC, jnp.float32)
    exact = mix_rms_norm(**arrays, eps=SPEC.eps, dtype=jnp.float32, backend="reference")
    with dispatch.interpret_kernels("gpu"):
        rounded = mix_rms_norm(**arrays, eps=SPEC.eps, dtype=jnp.bfloat16, backend="pallas")
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(rounded, np.float32), exact, rtol=2**-8)


@pytest.mark.thorough("2-3", "2-4")
@pytest.mark.parametrize(("sequences", "chunk_size"), [(2, 3), (2, 4), (3, 3), (1, 2)])
def test_the_order_of_rows_changes_nothing(sequences, chunk_size):
    op = functools.partial(mix_rms_norm, eps=SPEC.eps, dtype=jnp.float32)
    ordered = functools.partial(op, sequences=sequences, chunk_size=chunk_size)
    arrays = specs.sample(SPEC, jnp.float32)
    with dispatch.interpret_kernels("gpu"):
        actual, expected = (results_of(x, arrays)("pallas") for x in (ordered, op))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.thorough
def test_mixes_can_be_batched():
    arrays = jax.tree.map(lambda x: jnp.stack([x, -x]), specs.sample(SPEC, jnp.float32))
    op = functools.partial(mix_rms_norm, eps=SPEC.eps, dtype=jnp.float32)

    columns = jnp.arange(128.0)[None, None]

    def batched(*, backend, **arrays):
        return jax.vmap(lambda x: op(**x, backend=backend) * columns)(arrays)

    with dispatch.interpret_kernels("gpu"):
        actual = results_of(batched, arrays)("pallas")
    expected = results_of(batched, arrays)("reference")
    assert max(relative_errors(actual, expected).values()) < 1e-5


def maps_of(dtype):
    norm, linear = RMSNorm(128), nnx.Linear(128, 8, dtype=dtype, rngs=nnx.Rngs(0))
    norm.weight[...] = 0.3 * jax.random.normal(jax.random.key(0), (128,))
    return nnx.split(nnx.List([norm, linear]))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "ratio"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_the_map_of_a_mix_is_the_same_on_a_gpu_up_to_rounding(dtype, ratio):
    graph, params = maps_of(dtype)
    arrays = specs.sample(SPEC, jnp.float32)

    def results():
        @jax.jit
        def both(params, arrays):
            def apply(params, arrays):
                how = {"dtype": jnp.dtype(dtype), "sequences": 2, "chunk_size": 3}
                x, y, gate = (arrays[name] for name in ("x", "y", "gate"))
                maps = [tuple(nnx.merge(graph, params))]
                if can_fold(maps):
                    return normed_mix_map(x, y, gate, maps, **how).astype(jnp.float32)
                mixed = gate[..., None] * x + (1 - gate[..., None]) * y
                return normed_maps(mixed, maps, dtype=how["dtype"])[0].astype(jnp.float32)

            y, back = jax.vjp(apply, params, arrays)
            return y, back(jnp.cos(y))

        return both(params, arrays)

    written = results()
    # What is traced for a GPU runs here, with its kernels interpreted.
    with compiled_for("gpu"), dispatch.interpret_kernels("gpu"), dispatch.default_backend("pallas"):
        on_gpu = results()
    for name, error in relative_errors(on_gpu, written).items():
        assert error < ratio, name


@pytest.mark.thorough("2")
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_memory_layer_names_the_order_of_its_reads(groups, monkeypatch):
    rule = FwPKM(num_subkeys=8, key_dim=8, value_dim=8, top_k=2)
    layer = FastWeight(FastWeightConfig(rule=rule, chunk_size=4), 16, rngs=nnx.Rngs(0))
    memory, x = layer.init_memory(jax.random.key(1), groups=groups), jnp.ones((4, 12, 16))
    asked = []

    def recorded(*arrays, sequences, chunk_size, **how):
        asked.append((sequences, chunk_size))
        return normed_mix_map(*arrays, sequences=sequences, chunk_size=chunk_size, **how)

    monkeypatch.setattr(fast_weight, "can_fold", lambda maps: True)
    monkeypatch.setattr(fast_weight, "normed_mix_map", recorded)
    pending = layer.init_pending(4, groups, max_chunk_size=4, dtype=jnp.float32)
    jax.eval_shape(lambda: layer(x, memory))
    jax.eval_shape(lambda: layer(x, memory, write=False))  # Sequences read one after the other.
    jax.eval_shape(lambda: layer.stream(x, memory, pending))
    assert asked == [(4 // groups, 4), (1, 4), (1, 4)]
