"""Properties of the gated delta rule's kernels that the shared parity test does not cover."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.checks import relative_errors, results_of
from pallas_kernels.gated_delta import (
    chunk,
    chunk_gated_delta_rule,
    chunk_gradients,
)
from pallas_kernels.gated_delta.arguments import Inputs, Vectors
from pallas_kernels.gated_delta.gpu_chunk import span_sums
from pallas_kernels.gated_delta.gpu_prepare import prepare
from pallas_kernels.gated_delta.specs import SPECS, GatedDeltaSpec, sample
from pallas_kernels.gated_delta.tiles import SideBySide
from tests.kernels.entry import equations, programs

SPEC = GatedDeltaSpec(name="here", length=20, key=8, value=16)


@pytest.fixture
def _interpreted():
    with dispatch.interpret_kernels("tpu"):
        yield


def with_gradients(rule, arrays):
    """Results, and the cotangents of all arguments for the results as cotangents."""
    outputs, pull = jax.jit(functools.partial(jax.vjp, lambda x: tuple(rule(**x))))(arrays)
    return outputs, pull(outputs)[0]


def assert_close(actual, expected, ratio):
    def compare(path, a, b):
        assert a.dtype == b.dtype, path
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.linalg.norm(a - b) <= ratio * np.linalg.norm(b), jax.tree_util.keystr(path)

    jax.tree.map_with_path(compare, actual, expected)


IN_BFLOAT16 = {
    "tpu": ("wide_keys", "strong_writes", "strong_decay", "six_heads"),
    "gpu": ("wide_keys", "wide_values", "strong_writes"),
}


@pytest.mark.by_default("gpu-wide_keys", thorough=["tpu-wide_keys"])
@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        pytest.param(kernel, name, id=f"{kernel}-{name}")
        for kernel, names in IN_BFLOAT16.items()
        for name in names
    ],
)
def test_kernels_for_bfloat16_agree_with_the_reference(kernel, name):
    if kernel == "gpu" and jax.__version_info__ < (0, 11):  # TODO: drop once jax>=0.11.
        pytest.skip("Mosaic GPU's interpreter in jax 0.10 knows no transposed operand of wgmma")
    arrays = sample(next(spec for spec in SPECS if spec.name == name), jnp.bfloat16)
    results = results_of(chunk_gated_delta_rule, arrays)
    with dispatch.interpret_kernels(kernel):
        actual = results("pallas")
    assert actual[0][0].dtype == jnp.float32
    for path, error in relative_errors(actual, results("reference")).items():
        assert error < (1e-3 if "log_decay" in path else 1e-2), path


@pytest.mark.parametrize(("terms", "ratio"), [(2, 2.0**-16), (3, 2.0**-23)])
@pytest.mark.parametrize("contract", [(1, 0), (1, 1), (0, 0)])
def test_careful_products_of_rounded_tiles_keep_the_digits_of_their_terms(terms, ratio, contract):
    side = SideBySide(2, rounded=True)
    a, b = jax.random.normal(jax.random.key(0), (2, 64, 128))
    axes = [("r", "s"), ("s", "v")]
    axes[0] = ("s", "r") if contract[0] == 0 else axes[0]
    axes[1] = ("v", "s") if contract[1] == 1 else axes[1]
    letters = ",".join(f"{x}h{y}" for x, y in axes)
    heads = (np.asarray(x, np.float64).reshape(64, 2, 64) for x in (a, b))
    expected = np.einsum(f"{letters}->rhv", *heads).reshape(64, 128)
    with jax.disable_jit():  # XLA may leave out that a number is rounded and widened again.
        careful = side.careful_product(a, b, terms=terms, contract=contract)
        rounded = side.product(a, b, contract=contract)
    norm = np.linalg.norm(expected)
    assert np.linalg.norm(careful - expected) < ratio * norm
    assert 2.0**-10 * norm < np.linalg.norm(rounded - expected) < 2.0**-7 * norm


@pytest.mark.slow
@pytest.mark.usefixtures("_interpreted")
def test_no_memory_is_an_empty_memory():
    arrays = sample(SPEC, jnp.float32) | {"initial_state": jnp.zeros((1, 1, 8, 16))}
    rule = functools.partial(chunk_gated_delta_rule, backend="pallas", scale=0.3)
    given = rule(**arrays)
    del arrays["initial_state"]
    jax.tree.map(np.testing.assert_array_equal, rule(**arrays), given)


@pytest.mark.slow
@pytest.mark.usefixtures("_interpreted")
def test_pieces_equal_the_whole():
    arrays = sample(SPEC, jnp.float32)
    rule = functools.partial(chunk_gated_delta_rule, backend="pallas")
    whole = rule(**arrays)
    state = arrays.pop("initial_state")
    first = jax.tree.map(lambda x: x[:, :9], arrays)
    second = jax.tree.map(lambda x: x[:, 9:], arrays)
    before = rule(**first, initial_state=state)
    after = rule(**second, initial_state=before.final_state)
    joined = jnp.concatenate([before.output, after.output], axis=1)
    assert_close((joined, after.final_state), tuple(whole), 2e-6)


@pytest.mark.thorough
def test_a_model_lowers_the_kernels_of_all_layers_once():
    arrays = sample(GatedDeltaSpec(name="here", length=64, key=64, value=64), jnp.float32)

    def loss(values):
        for _ in range(3):
            values = chunk_gated_delta_rule(**arrays | {"value": values}).output
        return jnp.sum(values)

    with dispatch.compile_kernels("gpu"):
        jaxpr = jax.make_jaxpr(jax.grad(loss))(arrays["value"]).jaxpr
    found = programs(jaxpr, "_traced_once")
    assert len(found) == 2 * 3
    assert len(set(map(id, found))) == 2  # One forward and one backward pass.


@pytest.mark.slow
def test_one_chunks_backward_pass_is_exact_in_float64():
    """Compares the manual derivatives with automatic ones in float64, without float32 rounding."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        query, key, value = (rng.normal(size=(16, width)) for width in (4, 4, 6))
        key /= np.linalg.norm(key, axis=-1, keepdims=True)
        log_decay, beta = -(rng.exponential(size=(1, 16)) ** 3), rng.uniform(0, 2, size=(1, 16))
        inputs = [jnp.asarray(x) for x in (query, key, value, log_decay, beta)]
        inputs.append(jnp.asarray(rng.normal(size=(4, 6))))
        forward = functools.partial(chunk.chunk_forward, scale=0.7)
        (output, state), pull, inverse = jax.vjp(
            jax.jit(lambda *x: (forward(*x)[:2], forward(*x)[2])), *inputs, has_aux=True
        )
        actual = chunk_gradients.chunk_backward(Inputs(*inputs), inverse, output, state, scale=0.7)
        assert_close(tuple(actual), pull((output, state)), 1e-12)


def test_two_sums_make_every_span_of_a_chunk_as_exactly_as_float32_can():
    rng = np.random.default_rng(0)
    log_decay = -(rng.exponential(size=64) ** 6).astype(np.float32)  # From 1e-9 to thousands.
    sums = np.asarray(span_sums(jnp.asarray(log_decay)))
    for start in range(64):
        for end in range(start + 1, 64):
            level = (start ^ end).bit_length() - 1
            exact = np.sum(log_decay[start + 1 : end + 1], dtype=np.float64)
            assert abs(sums[level, start] + sums[level, end] - exact) <= 1e-6 * abs(exact)


def test_a_gpu_multiplies_bfloat16_operands_once_instead_of_three_times():
    def products(dtype):
        tokens = jax.ShapeDtypeStruct((1, 64, 1, 64), dtype)
        numbers = [(1, 1, 1, 6, 64), *[(1, 1, 1, 64)] * 3]
        vectors = Vectors(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in numbers))
        traced = (tokens, tokens, vectors.beta, vectors)
        with dispatch.compile_kernels("gpu"):
            return str(jax.make_jaxpr(prepare)(*traced)).count("wgmma_ref")

    # Keys with keys, and both halves of the inverse with keys and with values; the inverse itself
    # stays exact.
    assert products(jnp.float32) - products(jnp.bfloat16) == 5 * 2


@pytest.mark.thorough
def test_a_gpus_kernels_move_half_the_bytes_with_bfloat16():
    spec = GatedDeltaSpec(name="here", length=640)

    def gradients(arrays):
        outputs, pull = jax.vjp(lambda x: tuple(chunk_gated_delta_rule(**x)), arrays)
        return pull(outputs)

    def moved(dtype):
        arrays = jax.eval_shape(lambda: sample(spec, dtype))
        with dispatch.compile_kernels("gpu"):
            traced = jax.make_jaxpr(gradients)(arrays)
        return [
            sum(x.aval.size * x.aval.dtype.itemsize for x in (*call.invars, *call.outvars))
            for call in equations(traced.jaxpr)
            if str(call.params.get("name")).startswith("gated_delta_")
        ]

    wide, narrow = moved(jnp.float32), moved(jnp.bfloat16)
    assert len(wide) == len(narrow) == 6
    for half, whole in zip(narrow, wide, strict=True):  # The numbers per token stay float32.
        assert 0.5 < half / whole < 0.53


def test_a_profile_tells_the_gpus_kernels_apart():
    arrays = jax.eval_shape(lambda: sample(SPEC, jnp.bfloat16))

    def gradients(arrays):
        outputs, pull = jax.vjp(lambda x: tuple(chunk_gated_delta_rule(**x)), arrays)
        return pull(outputs)

    with dispatch.compile_kernels("gpu"):
        text = str(jax.make_jaxpr(gradients)(arrays))
    names = ("prepare", "walk", "read", "before_walk", "walk_back", "after_walk")
    assert {name for name in re.findall(r"gated_delta_(\w+)", text)} >= set(names)
