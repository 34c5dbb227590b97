"""The program behind the table of ways to retain, on made-up results and a tiny run."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from benchmarks.study import retention
from fwpkm_jax.run import Run
from fwpkm_jax.training.state import init_state, model_graph
from tests.training.tiny_config import get_config


def read(model, memory):
    return model.hidden(jnp.zeros((2, 8), jnp.int32), memory).memory


@pytest.fixture(scope="module")
def run():
    experiment = get_config()
    memory = experiment.training.memory
    state = init_state(experiment.model, memory=memory, optimizer=None, seed=0)
    return Run(experiment, model_graph(experiment.model), state.params, state.memory, 0)


def test_each_write_has_the_runs_weights_and_what_it_remembers(run):
    for name, (step, spared) in retention.VARIANTS.items():
        model, memory = retention.written_so(run, name)
        rule = model.config.fast_weight.rule
        plain = run.model.config.fast_weight.rule
        assert rule.value_step == step * plain.num_heads * plain.top_k
        assert replace(rule, value_step=None, retention=None) == plain
        written = jax.eval_shape(read, model, memory)
        structures = [jax.tree.structure(x) for x in (memory, written)]
        assert structures[0] == structures[1]
        for old, new in zip(jax.tree.leaves(run.memory), jax.tree.leaves(memory), strict=False):
            assert old.dtype == new.dtype
        (layer,) = memory.values()
        assert (layer.history is None) == (spared is None)


def test_the_table_compares_each_run_with_its_own_plain_write():
    def row(run, variant, adaptation):
        return {"run": run, "variant": variant, "adaptation": adaptation, "at_the_end": -0.5,
                "forgetting": 0.25, "unseen": 0.0}  # fmt: skip

    rows = [
        *(row("a", "plain", -1.0), row("a", "surprise 1", -2.0)),
        *(row("b", "plain", -3.0), row("b", "surprise 1", -2.0)),
        {"run": "a", "read_by": "plain", "readings_1": 0.5, "readings_4": 1.0},
        {"cost_of": "plain", "milliseconds_per_batch": 7.0, "history_bytes": 0},
    ]
    *_, plain, other = retention.table(rows).splitlines()
    assert plain == "| plain | -2.0000 | -0.5000 | 0.2500 | 0.0000 | 0.50, 1.00 | 7.0 | 0 |"
    assert other.startswith("| surprise 1 | -2.0000 (1 of 2) | -0.5000 (0 of 2) |")
