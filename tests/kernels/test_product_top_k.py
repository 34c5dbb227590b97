"""Properties of product_top_k's kernels beyond parity on the named shapes."""

import functools
import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from benchmarks.processes import ROOT
from fwpkm_jax.core.slots.keys import addressing
from pallas_kernels import dispatch
from pallas_kernels.product_top_k import api, select_slots, specs

TOP_K = 3
select = functools.partial(select_slots, top_k=TOP_K)
both_kernels = pytest.mark.parametrize("kernel", ["tpu", "gpu"])


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def sample(*, tokens=6, heads=2, subkeys=7, half=4):
    return draw(tokens, heads, 2 * half), draw(heads, 2, subkeys, half, seed=1)


@pytest.mark.slow_cases("gpu")
@pytest.mark.thorough
@both_kernels
def test_small_distances_between_large_vectors_are_as_accurate_as_float32(kernel):
    keys = 8 * draw(1, 2, 32, 64)
    queries = keys[0].swapaxes(0, 1).reshape(32, 1, 128) + 0.3 * draw(32, 1, 128, seed=2)
    with dispatch.interpret_kernels(kernel):
        actual = jax.jit(functools.partial(select, backend="pallas"))(queries, keys).address
    own = actual.sub_key_ids[:, 0, :, 0]
    np.testing.assert_array_equal(own, np.arange(32)[:, None].repeat(2, 1))
    halves = np.asarray(queries, np.float64).reshape(32, 2, 64)
    exact = np.sum((halves - np.asarray(keys[0], np.float64).swapaxes(0, 1)) ** 2, axis=-1)
    distances = np.exp(-np.asarray(actual.sub_key_scores[:, 0, :, 0], np.float64)) - 1e-3
    # Norms near 64 * 8**2 are subtracted: float32 leaves a few of their last bits. Products of
    # two bfloat16 terms instead of three would be off by four times the bound.
    np.testing.assert_allclose(distances, exact, rtol=0, atol=16 * 64 * 8**2 * 2.0**-23)


@pytest.mark.slow_cases("tpu")
@pytest.mark.thorough("tpu")
@both_kernels
def test_groups_are_batched_and_chunks_scanned(kernel):
    queries, keys = draw(3, 2, 5, 1, 8), draw(2, 1, 2, 7, 4, seed=1)  # chunks, groups, ...

    def total(queries, keys, backend):
        def chunk(carry, query):
            result = jax.vmap(functools.partial(select, backend=backend))(query, keys)
            return carry + jnp.sum(result.weights[..., 0]), result.address.slot_ids

        return jax.lax.scan(chunk, 0.0, queries)

    def run(backend):
        return jax.jit(
            jax.value_and_grad(functools.partial(total, backend=backend), (0, 1), has_aux=True)
        )(queries, keys)

    with dispatch.interpret_kernels(kernel):
        (actual, slots), gradients = run("pallas")
    (expected, expected_slots), expected_gradients = run("reference")
    np.testing.assert_array_equal(slots, expected_slots)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    for a, e in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_it_may_be_differentiated_twice():
    queries, keys = sample()

    def slope(keys, backend):
        def read(keys):
            return jnp.sum(select(queries, keys, backend=backend).weights[..., 0] ** 2)

        return jnp.sum(jax.grad(read)(keys) ** 2)

    with dispatch.interpret_kernels("tpu"):
        actual = jax.jit(jax.grad(functools.partial(slope, backend="pallas")))(keys)
    expected = jax.jit(jax.grad(functools.partial(slope, backend="reference")))(keys)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_query_on_a_sub_key_pulls_nothing_there():
    keys = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (1, 2, 12, 3)), jnp.float32)
    queries = keys[0, :, :5].swapaxes(0, 1).reshape(5, 1, 6)

    def total(queries, keys, select):
        address = select(queries, keys)
        return jnp.sum(address.sub_key_scores[..., :2]) + jnp.sum(address.slot_scores)

    def kernel_select(queries, keys):
        return select(queries, keys, backend="pallas").address

    with dispatch.interpret_kernels("tpu"):
        gradient = jax.jit(jax.grad(functools.partial(total, select=kernel_select), (0, 1)))
        actual = gradient(queries, keys)
    with jax.enable_x64(True):  # In float32 the reference cancels terms 1000 times the result.
        wide = [x.astype(jnp.float64) for x in (queries, keys)]
        plain = functools.partial(addressing.product_top_k, top_k=TOP_K)
        expected = jax.jit(jax.grad(functools.partial(total, select=plain), (0, 1)))(*wide)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough("tpu")
@both_kernels
def test_slots_of_queries_that_are_no_numbers_lie_in_the_table(kernel):
    queries, keys = sample(tokens=3, heads=1)
    with dispatch.interpret_kernels(kernel):
        damaged = queries.at[1].set(jnp.nan)
        address = jax.jit(functools.partial(select, backend="pallas"))(damaged, keys).address
    assert np.all((address.slot_ids >= 0) & (address.slot_ids < 7**2))
    whole = jax.jit(functools.partial(select, backend="reference"))(queries, keys).address
    np.testing.assert_array_equal(address.slot_ids[::2], whole.slot_ids[::2])


def test_no_score_matrix_leaves_the_kernel():
    queries, keys = sample(tokens=512, heads=1, subkeys=512, half=8)

    def largest(jaxpr):
        sizes = [var.aval.size for eqn in jaxpr.eqns for var in eqn.outvars]
        for eqn in jaxpr.eqns:
            if "pallas" not in eqn.primitive.name:
                sizes += [largest(inner) for inner in jaxprs_in_params(eqn.params)]
        return max(sizes, default=0)

    with dispatch.compile_kernels("tpu"):
        kernel = jax.make_jaxpr(functools.partial(select, backend="pallas"))(queries, keys)
    plain = jax.make_jaxpr(functools.partial(select, backend="reference"))(queries, keys)
    scores = 512 * 2 * 512
    assert largest(kernel.jaxpr) < scores <= largest(plain.jaxpr)


def test_doubles_are_left_to_the_reference():
    with jax.enable_x64(True), dispatch.interpret_kernels("tpu"):
        wide = [x.astype(jnp.float64) for x in sample()]
        assert jax.eval_shape(select, *wide).weights.dtype == jnp.float64


def test_senseless_shapes_are_refused_in_the_words_of_the_reference():
    with dispatch.interpret_kernels("tpu"), pytest.raises(ValueError, match="top_k=8 exceeds"):
        select_slots(*sample(), top_k=8, backend="pallas")


def test_a_gpu_leaves_keys_too_wide_for_its_shared_memory_to_the_reference(caplog):
    def traced(half, backend):
        shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((5, 1, 2 * half), (1, 2, 7, half))]
        with dispatch.compile_kernels("gpu"):
            return jax.make_jaxpr(functools.partial(select, backend=backend))(*shapes)

    assert "product_top_k_select" in str(traced(api.WIDEST_HALF["gpu"], "auto"))
    assert "product_top_k_select" not in str(traced(384, "auto"))
    assert "half=384; at most 1024, 32 and 320" in caplog.text
    with pytest.raises(NotImplementedError, match="half=384"):
        traced(384, "pallas")


@pytest.mark.slow
def test_the_check_before_first_use_allows_near_ties_and_no_other_ids(monkeypatch):
    spec = specs.TopKSpec(name="tie", tokens=20, subkeys=12, key=8, top_k=3)
    arrays = specs.sample(spec, jnp.float32)
    # Sub-key 1 of both codebooks nearly equals sub-key 0.
    arrays["keys"] = arrays["keys"].at[:, :, 1].set(arrays["keys"][:, :, 0] * (1 + 2e-7))

    def exchange(ids):
        return jnp.where(ids < 2, 1 - ids, ids)

    def ties(address):
        row, column = (exchange(x) for x in jnp.divmod(address.slot_ids, spec.subkeys))
        ids = exchange(address.sub_key_ids)
        return address._replace(slot_ids=row * spec.subkeys + column, sub_key_ids=ids)

    faults = {
        "scores of slot_ids": lambda a: a._replace(slot_ids=jnp.roll(a.slot_ids, 1, axis=0)),
        "scores of sub_key_ids": lambda a: a._replace(sub_key_ids=a.sub_key_ids[..., ::-1]),
        "slot_scores": lambda a: a._replace(slot_scores=a.slot_scores + 0.1),
        "repeated_ids": lambda a: a._replace(
            slot_ids=a.slot_ids.at[..., 1].set(a.slot_ids[..., 0])
        ),
    }

    def wrong(*arguments, backend, **options):
        del backend
        found = select_slots(*arguments, **options, backend="reference")
        return found._replace(address=changes[-1](found.address))

    monkeypatch.setattr(specs, "select_slots", wrong)
    monkeypatch.setattr(specs, "SPECS", (spec,))
    monkeypatch.setattr(specs, "CHECKED", (spec.name,))
    monkeypatch.setattr(specs, "sample", lambda spec, dtype: arrays)
    changes: list[Any] = [ties]
    specs.check("gpu")
    errors = specs.selection_errors("pallas", spec, arrays)
    assert 0 < errors["scores of slot_ids"] < 1e-6
    for name, fault in faults.items():
        changes.append(fault)
        with pytest.raises(AssertionError, match=f"{name} differs by"):
            specs.check("gpu")


TWO_WARPGROUPS = """
import json
import jax.numpy as jnp
from pallas_kernels import dispatch
from pallas_kernels.product_top_k import gpu_select, specs

gpu_select.INTERPRETED_GROUPS = 2
spec = specs.TopKSpec(name="here", tokens=70, subkeys=300, key=140, top_k=12)
with dispatch.interpret_kernels("gpu"):
    errors = specs.selection_errors("pallas", spec, specs.sample(spec, jnp.float32))
print(json.dumps({name: float(error) for name, error in errors.items()}))
"""


@pytest.mark.slow
def test_two_warpgroups_of_a_program_find_what_the_reference_finds():
    # Each of them takes a thread of XLA's pool, which has as many as NPROC says.
    run = subprocess.run(
        [sys.executable, "-c", TWO_WARPGROUPS],
        env=os.environ | {"NPROC": "8", "PYTHONPATH": str(ROOT)},
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    errors = json.loads(run.stdout)
    assert max(errors.values()) <= specs.CHECK_RATIO, errors
