"""`check_rule` passes what keeps the contract, and names the property that a fault breaks."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.rules.matrix.deltanet import DeltaNet
from fwpkm_jax.testing import check_rule, rule_documents, rule_properties
from fwpkm_jax.testing.rule_documents import DOCUMENT_PROPERTIES
from tests.testing.small_rule import SmallRule, ThawedRule

FAULTS = {
    "starts_in_bfloat16": "memory_starts_in_float32_and_from_the_key_alone",
    "starts_anyhow": "memory_starts_in_float32_and_from_the_key_alone",
    "pass_with_another_gradient": "pass_equals_the_scan_of_steps",
    "forgets_the_start": "pieces_equal_the_whole",
    "leaks_the_future": "later_chunks_never_change_earlier_outputs",
    "never_writes": "writes_are_read_by_later_chunks",
    "writes_padding": "contents_of_padding_do_not_matter",
    "decays_at_padding": "padding_alone_leaves_the_memory_bit_for_bit",
    "memory_takes_the_tokens_dtype": "memory_keeps_shape_and_dtype_under_any_tokens",
    "bfloat16_outputs": "memory_keeps_shape_and_dtype_under_any_tokens",
    "nan_gradient": "gradients_are_finite_and_reach_queries_targets_and_weights",
    "weights_have_no_gradient": "gradients_are_finite_and_reach_queries_targets_and_weights",
    "groups_share_a_memory": "groups_are_independent",
    "reports_vectors": "reports_and_access_have_the_declared_shapes",
    "slots_out_of_range": "reports_and_access_have_the_declared_shapes",
    "slots_without_values": "values_of_zeros_read_as_zeros",
    "specs_of_another_tree": "memory_specs_name_the_layout_of_every_leaf",
    "passes_write_twice_as_much": "a_pass_and_a_stream_make_the_same_chunks",
    "reads_its_own_write": "read_and_write_make_a_step",
    "write_is_not_the_steps": "read_and_write_make_a_step",
    "reads_other_tokens": "stream_cut_anywhere_follows_its_definition",
    "forgets_the_last_block": "blocks_write_what_the_chunk_writes",
}
PACKED = "packed_documents_equal_separate_rows"


@pytest.mark.slow
@pytest.mark.slow_cases("0")
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_memory_that_starts_at_zero_passes(lookahead):
    rule = SmallRule(lookahead=lookahead)
    check_rule(rule, properties=[p for p in rule_properties(rule) if p not in DOCUMENT_PROPERTIES])


def test_one_property_is_checked_without_the_others():
    check_rule(SmallRule(), properties=["memory_specs_name_the_layout_of_every_leaf"])


@pytest.mark.slow
@pytest.mark.slow_cases(
    "packed_documents_equal_separate_rows-2",
    "packed_documents_equal_separate_rows_in_single_precision-2",
    "packed_documents_equal_separate_rows_in_single_precision-0",
)
@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("name", DOCUMENT_PROPERTIES)
def test_documents_start_anew_and_without_resets_the_leak_is_found(name, lookahead, monkeypatch):
    rule = SmallRule(lookahead=lookahead)
    check_rule(rule, properties=[name])
    whole, piece = rule_documents.run_documents, rule_documents.NewDocuments

    def run_as_one(rule, memory, signals, starts, mask, **options):
        return whole(rule, memory, signals, jnp.zeros_like(starts), mask, **options)

    def none_new(starts, memory):
        return piece(jnp.zeros_like(starts), memory)

    monkeypatch.setattr(rule_documents, "run_documents", run_as_one)
    monkeypatch.setattr(rule_documents, "NewDocuments", none_new)
    with pytest.raises(AssertionError, match=rf"{name}: the .* of documents .* differs by"):
        check_rule(rule, properties=[name])


@pytest.mark.thorough("packed_documents_equal_separate_rows")
@pytest.mark.parametrize("name", [PACKED, f"{PACKED}_in_single_precision"])
def test_a_rule_whose_targets_mix_documents_is_found(name):
    with pytest.raises(AssertionError, match=rf"{name}: the output of documents"):
        check_rule(SmallRule(fault="targets_of_all_tokens"), properties=[name])


@pytest.mark.by_default("forgets_the_start", "never_writes", "writes_padding", "decays_at_padding")
@pytest.mark.parametrize(("fault", "name"), FAULTS.items(), ids=FAULTS)
def test_a_fault_breaks_its_property(fault, name):
    with pytest.raises(
        AssertionError, match=f"SmallRule breaks its contract:\n  {name}: "
    ) as error:
        check_rule(SmallRule(fault=fault), properties=[name])
    assert "TypeCheckError" not in str(error.value)  # It is found without runtime type checks.


@pytest.mark.thorough
def test_other_faults_of_reads_and_flushes_are_found():
    for fault, name in (
        ("reads_other_tokens", "reads_leave_no_trace_and_see_no_other_token"),
        ("forgets_the_last_block", "flush_writes_the_complete_pairs_once"),
    ):
        with pytest.raises(AssertionError, match=name):
            check_rule(SmallRule(fault=fault), properties=[name])


def test_a_rule_whose_fields_can_be_assigned_is_found():
    with pytest.raises(AssertionError, match="rule_is_a_frozen_value: a field can be assigned"):
        check_rule(ThawedRule(), properties=["rule_is_a_frozen_value"])


def test_every_property_has_its_fault():
    covered = {*FAULTS.values(), "rule_is_a_frozen_value"}
    covered |= {"reads_leave_no_trace_and_see_no_other_token"}
    covered |= {"flush_writes_the_complete_pairs_once"}
    covered |= set(DOCUMENT_PROPERTIES)  # With resets off.
    assert covered == set(rule_properties(SmallRule()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultyDeltaNet(DeltaNet):
    fault: str = ""

    def write(self, state, token):
        written = super().write(state, token)
        return state + 1.5 * (written - state) if self.fault == "writes_more" else written

    def chunked(self, tokens, state):
        if self.fault == "starts_empty":
            state = 0 * state
        return super().chunked(tokens, state)

    def skip(self, tokens, real):
        return tokens if self.fault == "skips_nothing" else super().skip(tokens, real)

    def run(self, tokens, initial_state=None):
        if self.fault == "takes_anything":
            strength = np.ones(tokens.key.shape[:3], np.float32)
            tokens = tokens._replace(strength=strength, log_decay=None)
        return super().run(tokens, initial_state)


MATRIX_FAULTS = {
    "writes_more": "a_write_is_the_gradient_steps_of_its_losses",
    "starts_empty": "chunks_equal_the_definition",
    "skips_nothing": "skipped_tokens_leave_the_memory_bit_for_bit",
    "takes_anything": "gates_that_do_not_fit_are_named",
}


@pytest.mark.by_default("writes_more", "skips_nothing", "takes_anything")
@pytest.mark.parametrize(("fault", "name"), MATRIX_FAULTS.items(), ids=MATRIX_FAULTS)
def test_a_fault_of_a_matrix_rule_breaks_its_property(fault, name):
    with pytest.raises(AssertionError, match=f"FaultyDeltaNet breaks its contract:\n  {name}: "):
        check_rule(FaultyDeltaNet(fault=fault), properties=[name])


def test_pieces_of_a_matrix_rule_that_forgets_its_start_are_found():
    rule = FaultyDeltaNet(fault="writes_more")
    with pytest.raises(AssertionError, match="two_pieces_equal_the_whole"):
        check_rule(rule, properties=["two_pieces_equal_the_whole"])


def test_unknown_properties_and_other_objects_are_refused():
    with pytest.raises(ValueError, match="'reads' is unknown; choose from"):
        check_rule(SmallRule(), properties=["reads"])
    with pytest.raises(TypeError, match="takes an instance below AbstractRule"):
        check_rule(SmallRule)
