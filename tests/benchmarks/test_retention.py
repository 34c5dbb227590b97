"""The program behind the table of ways to retain, on made-up results and a tiny run."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from benchmarks.study import retention
from fwpkm_jax.data import TextData
from fwpkm_jax.run import Run
from fwpkm_jax.training.state import init_state, model_graph
from tests.benchmarks.programs import result, run
from tests.training.tiny_config import get_config

pytestmark = pytest.mark.thorough


def read(model, memory):
    return model.hidden(jnp.zeros((2, 8), jnp.int32), memory).memory


@pytest.fixture(scope="module")
def made_up():
    experiment = get_config()
    memory = experiment.training.memory
    state = init_state(experiment.model, memory=memory, optimizer=None, seed=0)
    return Run(experiment, model_graph(experiment.model), state.params, state.memory, 0)


def test_each_write_has_the_runs_weights_and_what_it_remembers(made_up):
    for name, (step, spared) in retention.VARIANTS.items():
        model, memory = retention.written_so(made_up, name)
        rule = model.config.fast_weight.rule
        plain = made_up.model.config.fast_weight.rule
        assert rule.value_step == step * plain.num_heads * plain.top_k
        assert replace(rule, value_step=None, retention=None) == plain
        written = jax.eval_shape(read, model, memory)
        structures = [jax.tree.structure(x) for x in (memory, written)]
        assert structures[0] == structures[1]
        for old, new in zip(jax.tree.leaves(made_up.memory), jax.tree.leaves(memory), strict=False):
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


def test_runs_are_read_with_each_write_and_results_are_kept(made_up, tmp_path, monkeypatch, capsys):
    experiment = replace(
        get_config(), data=TextData(train_paths=("-",), valid_paths=(str(tmp_path),), length=16)
    )
    monkeypatch.setattr(retention, "load_run", lambda _: made_up._replace(experiment=experiment))
    monkeypatch.setattr(retention, "DOMAINS", ("only",))
    (tmp_path / "only").mkdir()
    for part in ("train", "valid"):
        (tmp_path / "only" / f"{part}.txt").write_text("\x01\x02" * 200)
    asked = []

    def continual_learning(model, memory, *, config, domains):
        asked.append((config.max_batches, config.max_eval_batches))
        means = {"adaptation": -1.0, "forgetting": 0.5, "unseen": 0.25}
        return SimpleNamespace(record={"results": {"loss": [[2.0], [1.5]], **means}})

    def needle_accuracy(model, memory, *, config, texts, tokenizer):
        asked.append(config.samples)
        runs = [{"readings": n, "exact": {"accuracy": n / 4}} for n in config.readings]
        return SimpleNamespace(record={"results": {"runs": runs}})

    monkeypatch.setattr(retention, "continual_learning", continual_learning)
    monkeypatch.setattr(retention, "needle_accuracy", needle_accuracy)
    out, sparing = tmp_path / "retention.json", "surprise 4, protection 2"
    options = (
        *("--runs", "runs/made_up", "--data", tmp_path, "--variants", "plain", sparing),
        *("--max-batches", 3, "--max-eval-batches", 2, "--samples", 5, "--turns", 1, "--out", out),
    )
    for _ in range(2):
        run("study.retention", *options)
    assert asked == [(3, 2), (3, 2), 5, 5]
    rows = result(out)["rows"]
    assert [row.get("variant") for row in rows[:2]] == ["plain", sparing]
    costs = [row for row in rows if "cost_of" in row]
    assert costs[0]["history_bytes"] < costs[1]["history_bytes"]
    assert f"| {sparing} | -1.0000 (0 of 1) |" in capsys.readouterr().out
