"""Cost follows what is touched: the value table is updated in place, forward and backward."""

import re

import jax
import jax.numpy as jnp
import pytest

from fwpkm_jax.rules import FwPKM

RULE = FwPKM(num_subkeys=64, key_dim=16, value_dim=32, top_k=4)
CHUNK, LENGTH = 16, 128


def _inputs(groups):
    rngs = jax.random.split(jax.random.key(0), 2)
    query = jax.random.normal(rngs[0], (groups, 1, LENGTH, 1, RULE.key_dim))
    value = jax.random.normal(rngs[1], (groups, 1, LENGTH, RULE.value_dim))
    memory = RULE.init(jax.random.key(1))
    return jax.tree.map(lambda x: jnp.stack([x] * groups), memory), query, value


def _run(memory, query, value):
    sequence = jax.vmap(lambda q, v: RULE.sequence(q, v, chunk_size=CHUNK))(query, value)
    out = RULE.run_groups(memory, sequence, chunk_size=CHUNK)
    return out.memory, out.output, out.info


def _gradient(memory, query, value):
    def loss(query, value):
        memory_after, output, info = _run(memory, query, value)
        return jnp.sum(output**2), (memory_after, info)

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(query, value)


def _table_copies(text, groups):
    """Instructions that copy a buffer as large as the tables, however it is shaped."""
    slots, width = RULE.num_slots, RULE.value_dim
    shapes = {f"f32[{groups},{slots},{width}]", f"f32[{groups * slots},{width}]"}
    return [
        line.strip()
        for line in text.splitlines()
        if (" copy(" in line or " copy-start(" in line) and any(s in line for s in shapes)
    ]


@pytest.mark.thorough("forward-1")
@pytest.mark.slow_cases("gradient-3")
@pytest.mark.compiled_text
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("function", [_run, _gradient], ids=["forward", "gradient"])
def test_no_table_is_copied_in_the_loop(function, groups):
    compiled = jax.jit(function, donate_argnums=0).lower(*_inputs(groups)).compile()
    loops = compiled.as_text().split("ENTRY")[0]
    assert "while" in compiled.as_text()
    assert _table_copies(loops, groups) == []


@pytest.mark.thorough("1")
@pytest.mark.two_phase
@pytest.mark.compiled_text
@pytest.mark.parametrize("groups", [1, 3])
def test_the_backward_pass_keeps_touched_rows_and_makes_no_table(groups):
    compiled = jax.jit(_gradient, donate_argnums=0).lower(*_inputs(groups)).compile()
    rows = groups * LENGTH * RULE.top_k * RULE.value_dim * 4
    subkeys = groups * LENGTH * 2 * RULE.num_subkeys * 4
    # The log, the cotangent of the touched rows, a chunk in passing; keys and scores besides.
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * rows + 8 * subkeys
    slots, width = groups * RULE.num_slots, RULE.value_dim
    assert not re.search(rf"f32\[{slots},{width}\]\S* broadcast", compiled.as_text())
    # Nor is the cotangent of the touched rows copied from chunk to chunk.
    touched = groups * LENGTH * RULE.top_k
    assert not re.search(rf"f32\[{touched},{width}\]\S* copy", compiled.as_text())


@pytest.mark.thorough
def test_the_guard_sees_a_copy_where_there_is_one():
    def keep_the_old_table(memory, query, value):
        def body(values, step):
            # A read of the old table that the write does not wait for.
            written = values.at[step].add(1.0)
            return written, jnp.sum(values[step + 1] * written[step])

        return jax.lax.scan(body, memory.values[0], jnp.arange(LENGTH))

    compiled = jax.jit(keep_the_old_table, donate_argnums=0).lower(*_inputs(1)).compile()
    assert _table_copies(compiled.as_text().split("ENTRY")[0], 1)
