"""Several memories side by side: a GPU's kernels, which cannot be batched, serve all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax import FwPKM
from fwpkm_jax.core.chunks import map_groups
from fwpkm_jax.core.slots.values.grouping import group_slots
from fwpkm_jax.layers.memories.fast_weight import FastWeight, FastWeightConfig
from pallas_kernels import dispatch
from pallas_kernels.slot_add import slot_add
from pallas_kernels.slot_read import slot_dot, slot_read
from tests.kernels.entry import equal_or_close

GROUPS, CHUNK, MODEL = 2, 64, 128
RULE = FwPKM(num_subkeys=128, key_dim=256, value_dim=128, top_k=2, backend="pallas")


def call(layer, x, memory, pending):
    return layer(x, memory)


def read_alone(layer, x, memory, pending):
    return layer(x, memory, write=False)


def stream(layer, x, memory, pending):
    return layer.stream(x, memory, pending)


def flush(layer, x, memory, pending):
    return layer.flush(memory, pending)


def by_document(layer, x, memory, pending):
    starts = jnp.arange(x.shape[1]) % 80 == 0
    return layer(x, memory, starts=jnp.broadcast_to(starts, x.shape[:2]))


@pytest.mark.thorough("call-")
@pytest.mark.parametrize(
    ("use", "kernels"),
    [
        (call, ["slot_read_error", "slot_add"]),
        (read_alone, ["slot_read"]),
        (stream, ["slot_read", "slot_read_error", "slot_add"]),
        (flush, ["slot_read", "slot_add"]),
        (by_document, ["slot_read"]),  # Steps of documents are plain.
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_every_use_of_two_memories_is_traced_with_the_gpus_kernels(use, kernels):
    documents = "document" if use is by_document else "carry"
    config = FastWeightConfig(rule=RULE, chunk_size=CHUNK, documents=documents)

    def made():
        layer = FastWeight(config, MODEL, rngs=nnx.Rngs(0))
        memory = layer.init_memory(jax.random.key(0), groups=GROUPS)
        room = {"max_chunk_size": 2 * CHUNK, "dtype": jnp.float32}
        return nnx.state(layer), memory, layer.init_pending(GROUPS, GROUPS, **room)

    params, memory, pending = jax.eval_shape(made)
    graph = nnx.graphdef(nnx.eval_shape(lambda: FastWeight(config, MODEL, rngs=nnx.Rngs(0))))
    x = jax.ShapeDtypeStruct((GROUPS, 2 * CHUNK, MODEL), jnp.float32)

    def run(params, x, memory, pending):
        return use(nnx.merge(graph, params), x, memory, pending)

    with dispatch.compile_kernels("gpu"):
        text = str(jax.make_jaxpr(run)(params, x, memory, pending))
    assert all(f"name={name}\n" in text for name in kernels)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


TABLES, IDS = draw(3, 9, 128), jnp.asarray([[[1, 4], [8, 0]], [[3, 3], [0, 8]], [[2, 5], [2, 7]]])
WEIGHTS, TARGETS, OF_TOKENS = draw(3, 2, 2), draw(3, 2, 128, seed=1), draw(3, 2)


def plain_read(values, slot_ids, weights, target, write_weight):
    given = {"target": target, "write_weight": write_weight, "backend": "reference"}
    return slot_read(values, slot_ids, weights, **given)


plain_dot = functools.partial(slot_dot, backend="reference")


@pytest.mark.thorough("own_tables")
@pytest.mark.parametrize("shared", [False, True], ids=["own_tables", "one_table"])
def test_reads_of_a_batch_are_one_launch_and_each_reads_its_own_table(shared):
    from pallas_kernels.slot_read import gpu

    tables, axis = (TABLES[0], None) if shared else (TABLES, 0)
    reads = functools.partial(jax.vmap, in_axes=(axis, 0, 0, 0, 0))
    dots = functools.partial(jax.vmap, in_axes=(axis, 0, 0))
    arrays = (tables, IDS, WEIGHTS, TARGETS, OF_TOKENS)
    with dispatch.compile_kernels("gpu"):
        text = str(jax.make_jaxpr(reads(gpu.read))(*arrays))
    assert text.count("name=slot_read_error") == 1
    with dispatch.interpret_kernels("gpu"):
        actual = jax.jit(reads(gpu.read))(*arrays), jax.jit(dots(gpu.dot))(tables, IDS, TARGETS)
    expected = reads(plain_read)(*arrays), dots(plain_dot)(tables, IDS, TARGETS)
    equal_or_close((tuple(actual[0]), actual[1]), (tuple(expected[0]), expected[1]), ratio=1e-6)


@pytest.mark.slow
def test_additions_of_a_batch_run_in_turn_each_in_its_own_table():
    from pallas_kernels.slot_add import gpu

    groups = jax.vmap(functools.partial(group_slots, num_slots=TABLES.shape[1]))(IDS)
    arrays = (TABLES, groups, WEIGHTS, TARGETS)
    with dispatch.interpret_kernels("gpu"):
        add = functools.partial(gpu.add, with_old_rows=True)
        values, old_rows = jax.jit(jax.vmap(add))(*arrays)
    plain = functools.partial(slot_add, with_old_rows=True, backend="reference")
    expected = jax.vmap(plain)(*arrays)
    equal_or_close(values, expected.values, ratio=1e-6)
    for i, distinct in enumerate(np.asarray(groups.num_groups)):
        np.testing.assert_array_equal(old_rows[i, :distinct], expected.old_rows[i, :distinct])


@pytest.mark.slow
@pytest.mark.slow_cases("tpu")
@pytest.mark.parametrize("kernel", ["gpu", "tpu"])
def test_what_memories_side_by_side_write_and_send_back_equals_plain_xla(kernel):
    rule = FwPKM(num_subkeys=4, key_dim=4, value_dim=8, top_k=2)
    memory = jax.vmap(rule.init)(jax.random.split(jax.random.key(0), GROUPS))
    query, value = draw(GROUPS, 1, 4, 1, 4), draw(GROUPS, 1, 4, 8, seed=1)
    sequence = jax.vmap(functools.partial(rule.sequence, chunk_size=2))(query, value)

    def results(query):
        def loss(query):
            moved = sequence._replace(query=query)
            run = functools.partial(rule.run, chunk_size=2)
            out = map_groups(run, memory, moved)
            return jnp.sum(jnp.sin(out.output)), (out.output, out.memory)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(query)

    expected = results(query)
    with dispatch.interpret_kernels(kernel):
        actual = results(query)
    equal_or_close(actual, expected, ratio=1e-5)
