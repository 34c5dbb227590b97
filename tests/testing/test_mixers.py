"""`check_mixer` passes what keeps the contract, and names the property that a fault breaks."""

import pytest

from fwpkm_jax.testing import MIXER_PROPERTIES, check_mixer
from tests.testing.small_mixer import SmallMixerConfig

FAULTS = {
    "bfloat16_parameters": "parameters_are_float32_and_share_no_buffer",
    "shared_buffer": "parameters_are_float32_and_share_no_buffer",
    "undeclared_parameter": "parameters_say_what_they_are",
    "axes_of_other_rank": "parameters_say_what_they_are",
    "forgets_the_cache": "stream_cut_anywhere_equals_the_whole",
    "always_a_cache": "stream_cut_anywhere_equals_the_whole",
    "sees_padding": "padding_anywhere_changes_no_token_and_no_cache",
    "padding_gives_numbers": "padding_anywhere_changes_no_token_and_no_cache",
    "ignores_documents": "packed_documents_equal_separate_rows",
    "decays_at_padding": "padding_alone_gives_zeros_and_keeps_the_cache",
    "reads_the_future": "later_tokens_do_not_reach_earlier_outputs",
    "own_token_unread": "later_tokens_do_not_reach_earlier_outputs",
    "reads_other_sequences": "sequences_of_a_batch_are_independent",
    "infinite_gradient": "gradients_of_bfloat16_tokens_are_finite_and_reach_every_parameter",
    "unused_parameter": "gradients_of_bfloat16_tokens_are_finite_and_reach_every_parameter",
    "float32_outputs": "bfloat16_stream_keeps_the_caches_dtypes",
    "float32_cache": "bfloat16_stream_keeps_the_caches_dtypes",
    "reset_keeps_the_sum": "reset_cache_gives_the_first_one",
}

SINGLE = "packed_documents_equal_separate_rows_in_single_precision"


@pytest.mark.thorough
def test_a_small_mixer_passes():
    check_mixer(
        SmallMixerConfig(), properties=[name for name in MIXER_PROPERTIES if name != SINGLE]
    )


@pytest.mark.thorough
def test_documents_that_leak_are_found_in_single_precision():
    check_mixer(SmallMixerConfig(), properties=[SINGLE])
    with pytest.raises(AssertionError, match=f"{SINGLE}: output of documents"):
        check_mixer(SmallMixerConfig(fault="ignores_documents"), properties=[SINGLE])


@pytest.mark.parametrize(("fault", "name"), FAULTS.items(), ids=FAULTS)
def test_a_fault_breaks_its_property(fault, name):
    found = f"SmallMixerConfig breaks its contract:\n  {name}: "
    with pytest.raises(AssertionError, match=found) as error:
        check_mixer(SmallMixerConfig(fault=fault), properties=[name])
    assert "TypeCheckError" not in str(error.value)  # It is found without runtime type checks.


def test_a_configuration_without_a_hash_is_found():
    with pytest.raises(AssertionError, match="config_is_a_frozen_value"):
        check_mixer(SmallMixerConfig(fault=["x"]), properties=["config_is_a_frozen_value"])


def test_every_property_has_its_fault():
    assert {*FAULTS.values(), "config_is_a_frozen_value", SINGLE} == set(MIXER_PROPERTIES)


def test_unknown_properties_and_other_objects_are_refused():
    with pytest.raises(ValueError, match="'reads' is unknown; choose from"):
        check_mixer(SmallMixerConfig(), properties=["reads"])
    with pytest.raises(TypeError, match="takes an AbstractMixerConfig"):
        check_mixer("attention")
