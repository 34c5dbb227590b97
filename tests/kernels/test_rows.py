"""The row kernels beyond parity: narrow tables, refusals, no unneeded table gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.slots.values.grouping import group_slots
from fwpkm_jax.core.slots.write import PLAIN
from pallas_kernels import dispatch
from pallas_kernels.slot_add.api import slot_add
from pallas_kernels.slot_add.specs import sample as sample_add
from pallas_kernels.slot_read.api import slot_dot, slot_read
from pallas_kernels.slot_read.specs import RowSpec, sample, sample_dot
from tests.kernels.entry import checked_again, equal_or_close, equations

SMALL = RowSpec(name="small", tokens=5, places=2, slots=16)


def made_like_the_table(function, *arrays):
    """Primitives that make an array of the table's shape (the first argument's)."""
    shape = arrays[0].shape
    jaxpr = jax.make_jaxpr(function)(*arrays).jaxpr
    return [
        equation.primitive.name
        for equation in equations(jaxpr)
        for result in equation.outvars
        if getattr(result.aval, "shape", None) == shape
    ]


@pytest.mark.slow
def test_a_bfloat16_table_is_read_in_float32_on_the_gpu_and_refused_on_the_tpu():
    arrays = sample(SMALL, jnp.float32)
    arrays["values"] = arrays["values"].astype(jnp.bfloat16)
    vectors = sample_dot(SMALL, jnp.float32)["vectors"]
    values, slot_ids = arrays["values"], arrays["slot_ids"]
    with dispatch.interpret_kernels("gpu"):
        actual = slot_read(**arrays, backend="pallas")
        dots = slot_dot(values, slot_ids, vectors, backend="pallas")
    equal_or_close(actual, slot_read(**arrays, backend="reference"), ratio=1e-6)
    equal_or_close(dots, slot_dot(values, slot_ids, vectors, backend="reference"), ratio=1e-6)
    with (
        dispatch.interpret_kernels("tpu"),
        pytest.raises(NotImplementedError, match="bfloat16 tables"),
    ):
        slot_read(**arrays, backend="pallas")


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["tpu", "gpu"])
def test_kernels_run_eagerly_inside_a_trace_as_a_devices_check_does(kernel):
    reads, adds = sample(SMALL, jnp.float32), sample_add(SMALL, jnp.float32)

    def results(backend):
        return tuple(slot_read(**reads, backend=backend)), slot_add(**adds, backend=backend)

    def check(kernel):
        with dispatch.interpret_kernels(kernel):
            equal_or_close(results("pallas"), results("reference"), ratio=1e-6)

    @jax.jit
    def checked(x):
        with checked_again():
            operation = dispatch.Operation("rows", lambda kernel: None, check=check)
            failures.append(operation._failure(kernel))
        return x

    failures = []
    checked(0)
    assert failures == [None]


@pytest.mark.parametrize("kernel", ["tpu", "gpu"])
def test_the_errors_of_kernels_are_those_of_the_writes_formula(kernel):
    arrays = sample(SMALL, jnp.float32)
    with dispatch.interpret_kernels(kernel):
        output, errors = jax.jit(lambda x: slot_read(**x, backend="pallas"))(arrays)
    expected = PLAIN.error(output, arrays["target"], arrays["write_weight"][:, None])
    equal_or_close(errors, expected, ratio=1e-6)


def test_targets_and_write_weights_go_together():
    arrays = sample(SMALL, jnp.float32)
    del arrays["target"]
    with pytest.raises(ValueError, match="pass both or neither"):
        slot_read(**arrays)


@pytest.mark.parametrize("kernel", ["tpu", "gpu"])
def test_no_gradient_of_the_table_is_made_unless_asked_for(kernel):
    arrays = sample(SMALL, jnp.float32)
    vectors = sample_dot(SMALL, jnp.float32)["vectors"]

    def loss(values, weights, vectors):
        read = slot_read(
            **{**arrays, "values": values, "weights": weights}, backend="pallas"
        ).output
        return jnp.sum(read**2) + jnp.sum(
            slot_dot(values, arrays["slot_ids"], vectors, backend="pallas") ** 2
        )

    inputs = arrays["values"], arrays["weights"], vectors
    with dispatch.compile_kernels(kernel):
        unasked = made_like_the_table(jax.grad(loss, argnums=(1, 2)), *inputs)
        asked = made_like_the_table(jax.grad(loss, argnums=0), *inputs)
    assert unasked == []
    assert asked  # So the search finds what it looks for.


@pytest.mark.slow
def test_additions_leave_other_rows_and_the_cotangent_of_the_table_alone():
    arrays = sample_add(SMALL, jnp.float32)
    direction = jax.random.normal(jax.random.key(3), arrays["values"].shape)
    with dispatch.interpret_kernels("tpu"):
        written, pull = jax.vjp(
            lambda values: slot_add(**{**arrays, "values": values}, backend="pallas"),
            arrays["values"],
        )
        (cotangent,) = pull(direction)
    touched = np.asarray(arrays["groups"].slots)[: int(arrays["groups"].num_groups)]
    others = np.setdiff1d(np.arange(SMALL.slots), touched)
    assert others.size
    np.testing.assert_array_equal(written[others], arrays["values"][others])
    np.testing.assert_array_equal(cotangent, direction)


@pytest.mark.slow
def test_second_derivatives_equal_the_references():
    arrays = sample(SMALL, jnp.float32)
    groups = group_slots(arrays["slot_ids"], num_slots=SMALL.slots)

    def loss(weights, backend):
        read = slot_read(**{**arrays, "weights": weights}, backend=backend)
        written = slot_add(arrays["values"], groups, -weights, read.errors, backend=backend)
        return jnp.sum(jnp.sin(written))

    def second(backend):
        return jax.grad(lambda w: jnp.sum(jax.grad(loss)(w, backend) ** 2))(arrays["weights"])

    with dispatch.interpret_kernels("tpu"):
        actual = second("pallas")
    equal_or_close(actual, second("reference"), ratio=1e-5)
