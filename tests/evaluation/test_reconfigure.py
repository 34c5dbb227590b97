"""A trained model that writes otherwise, and its memory with what that needs."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from fwpkm_jax import generate, init_generation, memories
from fwpkm_jax.core.slots.options.retention import SlotHistory
from fwpkm_jax.evaluation.reconfigure import with_rule
from fwpkm_jax.rules import FwMLP, Retention


def answers(model, memory, text):
    state = init_generation(model, memory, batch=1, max_length=64)
    return generate(model, [text], state, max_new_tokens=4)


@pytest.mark.slow
def test_a_model_writes_by_another_rule(model, memory):
    rule = model.config.fast_weight.rule
    sparing = replace(rule, inner_steps=2, retention=Retention(relocation=1.0, replay=6))
    ours, begun = with_rule(model, memory, sparing)
    for layer, one in begun.items():
        np.testing.assert_array_equal(one.values, memory[layer].values)
        assert one.history.replayed.write_weight.shape == (1, 6)
        assert not np.any(one.history.replayed.write_weight)
    plain, spared = (answers(*pair, list(range(40))) for pair in ((model, memory), (ours, begun)))
    for layer, one in spared.state.stream.memory.items():
        assert np.all(one.history.replayed.write_weight > 0)
        assert np.any(one.values != plain.state.stream.memory[layer].values)
    back, plain_memory = with_rule(ours, begun, rule)
    assert back.config == model.config
    jax.tree.map(np.testing.assert_array_equal, plain_memory, memory)


@pytest.mark.slow
def test_a_history_is_saved_with_its_memory(model, memory, tmp_path):
    rule = replace(model.config.fast_weight.rule, retention=Retention(replay=6, hardening=0.5))
    model, memory = with_rule(model, memory, rule)
    state = answers(model, memory, list(range(40))).state
    memories.save(tmp_path, "alice", state, model=model)
    loaded = memories.load(tmp_path, "alice", model)
    jax.tree.map(np.testing.assert_array_equal, loaded.stream.memory, state.stream.memory)
    for one in loaded.stream.memory.values():
        assert isinstance(one.history, SlotHistory)


def test_a_rule_of_other_sizes_or_of_another_kind_is_refused(model, memory):
    rule = replace(model.config.fast_weight.rule, num_subkeys=5)
    with pytest.raises(ValueError, match=r"memory.keys is float32\[1, 1, 2, 4, 4\]; expected"):
        with_rule(model, memory, rule)
    with pytest.raises(ValueError, match=r"memory is a tree of .keys .* expected a tree of .up"):
        with_rule(model, memory, FwMLP.tiny())
    with pytest.raises(ValueError, match=r"memory is a tree of .up_kernel .* tree of .keys"):
        rule.convert_memory(FwMLP.tiny().init(jax.random.key(0)))
