"""Each registered rule keeps the public contract, `fwpkm_jax.testing.check_rule`."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest

from fwpkm_jax.rules.matrix import MATRIX_RULES
from fwpkm_jax.testing import check_rule, rule_properties
from fwpkm_jax.testing.matrix_rules import sample_tokens
from fwpkm_jax.testing.rule_documents import DOCUMENT_PROPERTIES
from tests.rules.sampling import (
    INSTANCES,
    init_memory,
    sample_signals,
    to_sequence,
    with_all_fields,
)

MATRIX_VARIANTS = {
    f"{name}{index or ''}": rule
    for name, cls in MATRIX_RULES.items()
    for index, rule in enumerate(cls.variants())
}


@pytest.mark.slow_cases("fwpkm")
@pytest.mark.thorough("fwpkm")
@pytest.mark.parametrize("rule", INSTANCES.values(), ids=INSTANCES)
def test_a_rule_keeps_its_contract(rule):
    names = [name for name in rule_properties(rule) if name not in DOCUMENT_PROPERTIES]
    check_rule(rule, sequence=with_all_fields, properties=names)


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENT_PROPERTIES)
@pytest.mark.parametrize("rule", [name for name in INSTANCES if name.startswith(("fw", "sdm"))])
def test_documents_of_a_row_are_read_and_written_as_alone(rule, name):
    """By default a rule of the tests and `tests/layers/memories/test_fast_weight.py` show it."""
    check_rule(INSTANCES[rule], properties=[name])


@pytest.mark.thorough("gated_deltanet", "falcon3a")
@pytest.mark.parametrize("rule", MATRIX_VARIANTS.values(), ids=MATRIX_VARIANTS)
def test_a_matrix_rule_keeps_its_contract(rule):
    check_rule(rule)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rule", MATRIX_VARIANTS.values(), ids=MATRIX_VARIANTS)
def test_chunks_read_and_leave_what_the_definition_does(rule):
    """Of every rule without gradients, which its contract checks besides."""
    tokens = sample_tokens(rule, batch=1, length=5, heads=1)
    forms = jax.jit(lambda x: (dataclasses.replace(rule, chunk_size=3).run(x), rule.recurrent(x)))
    chunked, token_by_token = forms(jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), tokens))
    chex.assert_trees_all_close(chunked, token_by_token, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("name", ["fwpkm", "fwmlp"])
def test_streams_follow_their_definition_at_any_lookahead(name, lookahead):
    """The contract streams each rule with its own lookahead; a small rule has others by default."""
    names = ["stream_cut_anywhere_follows_its_definition", "flush_writes_the_complete_pairs_once"]
    check_rule(dataclasses.replace(INSTANCES[name], lookahead=lookahead), properties=names)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rule", INSTANCES.values(), ids=INSTANCES)
def test_jit_equals_eager(rule):
    signals = sample_signals(rule, length=2, masked=True)
    sequence = to_sequence(rule, signals, chunk_size=2, dtype=jnp.float64)
    chunk = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sequence)
    memory = init_memory(rule, jnp.float64)
    eager, jitted = rule.step(memory, chunk), jax.jit(rule.step)(memory, chunk)
    chex.assert_trees_all_close(eager, jitted, rtol=1e-10, atol=1e-12)
