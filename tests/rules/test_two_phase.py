"""FwPKM's two phases, all slots first and then the values, equal the plain scan of its steps."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.chunks import map_groups, scan_chunks
from fwpkm_jax.core.slots.options.retention import Retention
from fwpkm_jax.rules import FwPKM
from pallas_kernels import dispatch
from tests.rules.sampling import init_memory, sample_signals, to_sequence

pytestmark = pytest.mark.two_phase
RULE = FwPKM(num_subkeys=5, key_dim=6, value_dim=4, num_heads=2, top_k=3)
WIDE = FwPKM(num_subkeys=30, key_dim=6, value_dim=4, top_k=3)  # More slots than references.
SPARING = dataclasses.replace(
    RULE,
    retention=Retention(hardening=1.0, relocation=0.5),
)
REPEATING = dataclasses.replace(SPARING, inner_steps=3)
REPLAYING = dataclasses.replace(RULE, retention=Retention(replay=3))
REPLAYING_AND_SPARING = dataclasses.replace(
    REPEATING, retention=dataclasses.replace(SPARING.retention, replay=7)
)
HARDENING = dataclasses.replace(RULE, retention=Retention(hardening=1.0))
CHUNK = 4


def sample(rule, dtype, *, length, groups=1, masked=False):
    parts = []
    for seed in range(groups):
        signals = sample_signals(rule, length=length, seed=seed, masked=masked)
        parts.append(to_sequence(rule, signals, chunk_size=CHUNK, dtype=dtype))
    memory = init_memory(rule, dtype)
    sequence = jax.tree.map(lambda *x: jnp.stack(x), *parts)
    sequence = sequence._replace(factor=1.0 + 0.5 * sequence.counted * sequence.write_weight)
    return jax.tree.map(lambda x: jnp.stack([x] * groups), memory), sequence


@functools.partial(jax.jit, static_argnums=(0, 1))
def outputs_and_gradients(rule, plain, memory, sequence):
    """Of a loss over outputs and final memory, with respect to memory and all of the sequence."""

    def loss(memory, sequence):
        if plain:
            out = map_groups(
                lambda m, s: scan_chunks(rule.step, m, s, chunk_size=CHUNK), memory, sequence
            )
        else:
            out = rule.run_groups(memory, sequence, chunk_size=CHUNK)
        ends = jax.tree.leaves((out.output, out.memory))
        # The change's norm is compared as an output; its slope is not part of either.
        return sum(jnp.sum(jnp.sin(3.0 * x)) for x in ends), out

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(memory, sequence)


# More slots than references, or fewer: a matter of one chunk, so that not all lengths need both.
@pytest.mark.by_default(
    "few_slots-short", thorough=["hardening-two_chunks", "everything-groups_and_rest"]
)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("rule", "length", "groups", "masked"),
    [
        *[(RULE, 3, 1, False), (RULE, 64, 1, True), (SPARING, 10, 2, False)],
        (HARDENING, 8, 1, False),
        (REPEATING, 10, 2, True),
        *[(REPLAYING, 10, 1, True), (REPLAYING_AND_SPARING, 10, 2, True)],
        # The contract of FwPKM says the same of these, see test_contract.py.
        pytest.param(RULE, 10, 3, True, marks=pytest.mark.slow),
        *[(WIDE, 4, 1, False), pytest.param(WIDE, 10, 3, True, marks=pytest.mark.slow)],
    ],
    ids=[
        *["few_slots-short", "few_slots-sixteen_chunks", "sparing-groups_and_rest"],
        *["hardening-two_chunks", "inner_steps-groups_and_rest"],
        *["replay-rest", "everything-groups_and_rest", "few_slots-groups_and_rest"],
        *["many_slots-one_chunk", "many_slots-groups_and_rest"],
    ],
)
def test_outputs_and_all_gradients_equal_the_plain_scan(rule, length, groups, masked):
    inputs = sample(rule, jnp.float64, length=length, groups=groups, masked=masked)
    plain = outputs_and_gradients(rule, True, *inputs)
    ours = outputs_and_gradients(rule, False, *inputs)
    chex.assert_trees_all_close(ours, plain, rtol=1e-10, atol=1e-10)


def assert_close_by_norm(actual, expected, tolerance=1e-5):
    def compare(actual, expected):
        if jnp.issubdtype(expected.dtype, jnp.floating):
            gap = np.linalg.norm(actual - expected)
            assert gap <= tolerance * max(np.linalg.norm(expected), 1e-3)
        else:
            np.testing.assert_array_equal(actual, expected)

    jax.tree.map(compare, actual, expected)


def in_single_precision(**options):
    return sample(WIDE, jnp.float32, length=10, groups=2, **options)


@pytest.mark.slow
def test_single_precision_agrees_relative_to_the_norm():
    inputs = in_single_precision()
    plain, ours = (outputs_and_gradients(WIDE, x, *inputs) for x in (True, False))
    assert_close_by_norm(ours, plain)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["tpu", pytest.param("gpu", marks=pytest.mark.slow)])
def test_kernels_agree_with_the_plain_scan(kernel):
    inputs = in_single_precision(masked=True)
    plain = outputs_and_gradients(WIDE, True, *inputs)
    with dispatch.interpret_kernels(kernel):
        ours = outputs_and_gradients(dataclasses.replace(WIDE, backend="pallas"), False, *inputs)
    assert dispatch.decisions["value_scan", kernel, "chosen"]
    # Queries near keys magnify rounding: here either is 2e-5 to 4e-5 from float64.
    assert_close_by_norm(ours, plain, tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.slow_cases("{'key_loss': 'reconstruction'}", "{'weight_decay': 0.1}")
@pytest.mark.parametrize(
    "options",
    [
        {"key_loss": "reconstruction"},
        {"key_loss": "both"},
        {"write_clip": 1.0},
        {"weight_decay": 0.1},
    ],
    ids=str,
)
def test_where_keys_read_values_or_writes_are_dense_the_plain_scan_runs(options):
    rule = FwPKM(num_subkeys=5, key_dim=6, value_dim=4, top_k=3, **options)
    assert not rule.two_phase
    memory, sequence = jax.eval_shape(lambda: sample(rule, jnp.float32, length=8))
    plain, ours = (
        outputs_and_gradients.lower(rule, x, memory, sequence).as_text() for x in (True, False)
    )
    assert ours == plain
