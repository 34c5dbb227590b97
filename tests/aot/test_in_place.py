"""A table that kernels read and write in a loop is never copied, on any device."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import SingleDeviceSharding

from benchmarks.compiled import launches
from benchmarks.compiled.absent_devices import DEVICES, TPUS, kernels_for
from benchmarks.compiled.traffic import Sizes
from benchmarks.compiled.traffic import launches as launches_by_loop
from fwpkm_jax.core.slots.values.grouping import group_slots
from fwpkm_jax.layers.parameters import parameter
from fwpkm_jax.rules import FwPKM
from fwpkm_jax.training.optimizer import (
    OptimizerConfig,
    global_norm,
    make_optimizer,
    side_by_side,
)
from pallas_kernels.slot_add.api import slot_add
from pallas_kernels.slot_read.api import slot_dot, slot_read
from tests.aot.devices import absent_device

SLOTS, VALUE, CHUNKS, TOKENS, PLACES = 512**2, 512, 3, 512, 8


def read_and_write(values, slot_ids, weights, targets, write_weights):
    def step(values, chunk):
        slot_ids, weights, targets, write_weights = chunk
        groups = group_slots(slot_ids, num_slots=SLOTS)
        output, errors = slot_read(
            *(values, slot_ids, weights),
            target=targets,
            write_weight=write_weights,
            backend="pallas",
        )
        written = slot_add(
            *(values, groups, -weights, errors), with_old_rows=True, backend="pallas"
        )
        after = slot_dot(written.values, slot_ids, errors, backend="pallas")
        return written.values, (output, written.old_rows[:1], after)

    return jax.lax.scan(step, values, (slot_ids, weights, targets, write_weights))


@pytest.mark.aot
@pytest.mark.parametrize("device", DEVICES)
def test_a_table_carried_through_kernels_is_not_copied(device):
    sharding = SingleDeviceSharding(absent_device(device))

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    arrays = (
        array(SLOTS, VALUE),
        array(CHUNKS, TOKENS, PLACES, dtype=jnp.int32),
        array(CHUNKS, TOKENS, PLACES),
        array(CHUNKS, TOKENS, VALUE),
        array(CHUNKS, TOKENS),
    )
    with kernels_for(device):
        compiled = jax.jit(read_and_write, donate_argnums=0).trace(*arrays).lower().compile()
    table = rf"f32\[{SLOTS},{VALUE}\]"
    assert re.search(table, compiled.as_text())
    copies = re.findall(rf"= \(?{table}\S* (?:copy|copy-start|fusion)\(.*", compiled.as_text())
    assert copies == []
    # The log of a chunk's rows and a chunk's reads; the table itself is 512 MiB.
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * TOKENS * PLACES * VALUE * 4
    assert compiled.memory_analysis().alias_size_in_bytes >= SLOTS * VALUE * 4


LENGTH, RULE = 2048, FwPKM(num_subkeys=512, key_dim=512, value_dim=512, backend="pallas")


def gradients(memory, sequence):
    """Of the memory alone at the paper's widths, 4 chunks, as in training: the table is state."""

    def loss(query, target):
        moved = sequence._replace(query=query, target=target)
        out = RULE.run_groups(memory, moved, chunk_size=512)
        return jnp.sum(out.output**2), (out.memory, out.info)

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(sequence.query, sequence.target)


@pytest.mark.thorough("v5e")
@pytest.mark.aot
@pytest.mark.parametrize("device", [*TPUS, "h100"])
def test_training_the_memory_copies_no_table_and_keeps_touched_rows(device):
    sharding = SingleDeviceSharding(absent_device(device))
    query = jnp.zeros((1, 1, LENGTH, 1, RULE.key_dim), jnp.float32)
    value = jnp.zeros((1, 1, LENGTH, RULE.value_dim), jnp.float32)
    arrays = jax.eval_shape(
        lambda: (
            jax.tree.map(lambda x: x[None], RULE.init(jax.random.key(0))),
            jax.vmap(lambda q, v: RULE.sequence(q, v, chunk_size=512))(query, value),
        )
    )
    arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays
    )
    with kernels_for(device):
        compiled = jax.jit(gradients, donate_argnums=0).trace(*arrays).lower().compile()
    assert made_tables(compiled.as_text()) == []
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    # The log, the cotangent of the touched rows and a chunk in passing take three times the
    # touched rows; v5e's compiler lays the log out a second time.
    rows = LENGTH * RULE.top_k * RULE.value_dim * 4
    assert memory.peak_memory_in_bytes - held < (4 if device == "v5e" else 3) * rows
    assert memory.alias_size_in_bytes >= SLOTS * VALUE * 4


def made_tables(text):
    """Instructions that write a new table-shaped buffer, rather than pass one on."""
    passed_on = "parameter|get-tuple-element|bitcast|while|tuple|custom-call|opt-barrier"
    table = rf"= f32\[(?:1,)?{SLOTS},{VALUE}\]\S* (?!{passed_on})"
    return [line.strip() for line in text.splitlines() if re.search(table, line)]


@pytest.mark.aot
def test_a_gpu_runs_no_kernel_twice_and_none_for_the_norm_that_is_not_asked_for():
    options = launches.Options(subkeys=128, dim=256, chunk_size=64, batch=2)
    absent_device("h100")  # Skips where its compiler is missing.
    kernels = [
        row["kernels"] for row in launches.loops(launches.compiled_text(options, options.rule))
    ]
    add = {"slot_add": 1, "slot_add_segments": 1}
    assert {"slot_read_error": 1, **add} in kernels  # Two dots more would give the norm.
    assert {"slot_back": 1, **add} in kernels
    of_keys = {"key_scan_add": 1, "key_scan_totals": 1}
    assert {"product_top_k_select": 1, "key_scan_step": 1, **of_keys} in kernels
    assert {"key_scan_pulls_back": 1, "key_scan_step_back": 1, **of_keys} in kernels


@pytest.mark.aot
def test_a_gpu_reads_and_adds_the_rows_of_sdm_by_fwpkms_kernels():
    options = launches.Options(rule="sdm", subkeys=128, dim=256, chunk_size=64, batch=1)
    absent_device("h100")  # Skips where its compiler is missing.
    kernels = [
        row["kernels"] for row in launches.loops(launches.compiled_text(options, options.rule))
    ]
    # Of what the tokens read, their errors alone: the loss is linear in the rest.
    assert {"slot_read": 1, "slot_add": 1, "slot_add_segments": 1} in kernels
    back = {"slot_read": 1, "slot_dot": 3, "slot_add": 2, "slot_add_segments": 2}
    assert back in kernels


@pytest.mark.aot
def test_a_gpu_updates_small_arrays_of_one_shape_in_few_launches():
    sharding = SingleDeviceSharding(absent_device("h100"))
    optimizer = make_optimizer(OptimizerConfig(), steps=10)

    def shapes(make, *arguments):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(make, *arguments),
        )

    weights = shapes(lambda: {i: parameter(jnp.zeros(768), "norm_scale") for i in range(40)})
    state = shapes(optimizer.init, weights)

    def launched(arranged):
        def update(weights, state, grads):
            grads = arranged(grads)
            updates, state = optimizer.update(grads, state, weights, grad_norm=global_norm(grads))
            return optax.apply_updates(weights, updates), state

        jitted = jax.jit(update, donate_argnums=(0, 1))
        text = jitted.trace(weights, state, weights).lower().compile().as_text()
        _, found = launches_by_loop(text, Sizes(tokens=1, places=1, value=1, distinct=1.0))["ENTRY"]
        return len(found)

    assert launched(side_by_side) < 15 < 40 < launched(lambda grads: grads)
