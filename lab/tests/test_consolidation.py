"""The program that lets a product-key memory learn what FwPKM has read, on a tiny run."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.data import TextData
from fwpkm_jax.evaluation.continual.domains import read_domains
from fwpkm_jax.layers.pkm import PKMConfig
from fwpkm_jax.run import Run
from fwpkm_jax.training.state import init_state, model_graph, trained_part
from lab.study import consolidation, retention, retention_domains
from lab.study.consolidation import SPARSE, WAYS, Memories, Options, Way
from tests.benchmarks.programs import run
from tests.training.tiny_config import get_config

DOMAINS = ("one", "two", "three")
TABLE = "blocks/0/feed_forward/values"


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """A run with both memories, and a folder of three domains of words that repeat."""
    folder = tmp_path_factory.mktemp("texts")
    for name in DOMAINS:
        (folder / name).mkdir()
        for part in ("train", "valid"):
            (folder / name / f"{part}.txt").write_text(f"{name} " * 100)
    experiment = get_config()
    model = dataclasses.replace(
        experiment.model,
        vocab_size=257,
        pkm_layers=(0,),
        pkm=PKMConfig(num_subkeys=4, key_dim=8, value_dim=8, num_heads=1, top_k=2),
        memory_layers=(1,),
    )
    data = TextData(length=16, train_paths=("none",), valid_paths=("none",))
    experiment = dataclasses.replace(experiment, model=model, data=data)
    state = init_state(model, memory=experiment.training.memory, optimizer=None, seed=0)
    return Run(experiment, model_graph(model), state.params, state.memory, 0), folder


def changes(made_up, way, rate=0.0):
    made_up, folder = made_up
    options = Options(data=folder, batches=4, eval_batches=2)
    return consolidation.domains_line(made_up, way, rate, DOMAINS, options)["change"]


def test_the_loss_is_the_cross_entropy_to_the_teacher():
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.2, 0.6]]]))
    target = jnp.array([[[0.5, 0.5, 0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]])
    found = consolidation.cross_entropy(logits, target)
    expected = -0.5 * np.log(0.5) - 0.5 * np.log(0.25) - np.log(0.8)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("teacher", ["memory", "text"])
def test_a_step_changes_the_slots_that_were_read_and_the_fast_memory_as_a_write_does(
    made_up, teacher
):
    made_up, _ = made_up
    graphdef, params = nnx.split(made_up.model)
    tokens = jnp.tile(jnp.arange(5, 22), (2, 1))
    read = made_up.model(tokens[:, :-1], made_up.memory)
    slots = np.unique(read.pkm_slot_ids["layer_0"])
    before = trained_part(params, (SPARSE,))
    assert list(before) == [TABLE]
    after = consolidation.read_and_consolidate(
        *(graphdef, graphdef, params, Memories(before, made_up.memory), made_up.memory, tokens),
        rate=0.5,
        way=Way(teacher=teacher),
    )
    jax.tree.map(np.testing.assert_array_equal, after.fast, read.memory)
    moved = np.flatnonzero(np.any(after.slow[TABLE] != before[TABLE], axis=1))
    assert len(moved) > 0
    assert set(moved) <= set(slots.tolist())
    assert len(slots) < len(before[TABLE])


@pytest.mark.thorough
def test_without_a_teacher_it_is_the_plain_write_and_without_a_step_nothing_changes(made_up):
    found = changes(made_up, WAYS["plain"])
    run, folder = made_up
    text = run.experiment.data
    model, memory = retention.written_so(run, retention.METHODS["plain"])
    domains = read_domains([f"{name}={folder / name}" for name in DOMAINS], text)
    expected = retention_domains.domains_kept(
        model, model, memory, domains, batches=4, eval_batches=2
    )
    assert found["adaptation"][0] != 0
    np.testing.assert_allclose(found["own"], expected["own"], atol=1e-6)
    np.testing.assert_allclose(found["end"], expected["end"], atol=1e-6)
    assert changes(made_up, WAYS["consolidated"])["adaptation"] == [0, 0, 0]
    carried = changes(made_up, WAYS["consolidated, carried"])
    np.testing.assert_allclose(carried["end"], expected["end"], atol=1e-6)
    hardened = changes(made_up, WAYS["hardened"])
    assert abs(np.asarray(hardened["own"]) - expected["own"]).max() > 1e-5


@pytest.mark.thorough
def test_the_slow_memory_learns_what_its_teacher_knows(made_up):
    learned = changes(made_up, Way(teacher="text", carried=False), rate=0.3)
    assert learned["adaptation"][2] < 0, "the words repeat"
    # An untrained teacher knows little; the tables still differ from those that learned the text.
    taught = changes(made_up, Way(teacher="memory", carried=False), rate=0.3)
    assert taught["adaptation"] != learned["adaptation"]


@pytest.mark.thorough
def test_the_program_measures_what_its_file_lacks(made_up, tmp_path, monkeypatch, capsys):
    made_up, folder = made_up
    loaded = []
    monkeypatch.setattr(consolidation, "load_run", lambda path: loaded.append(path) or made_up)
    monkeypatch.setattr(consolidation, "DOMAINS", DOMAINS)
    out = tmp_path / "lines.jsonl"
    small = (
        *("--data", folder, "--batches", 2, "--eval_batches", 1, "--out", out),
        *("--runs", "one_seed0", "--orders", "given", "--image", tmp_path / "picture.png"),
    )
    with pytest.raises(SystemExit, match=r"\['one_seed0 domains given 2'\] lack plain"):
        run("lab.study.consolidation", *small, "--ways", "text", "--rates", 0.1)
    run("lab.study.consolidation", *small, "--ways", "plain", "text", "--rates", 0.1, 0.2)
    methods = [json.loads(line)["method"] for line in out.read_text().splitlines()]
    assert methods == ["text, 0.1", "plain", "text, 0.2"]
    assert "| text, 0.2 | given | 0 kB | 1 |" in capsys.readouterr().out
    (tmp_path / "picture.png").unlink()
    run("lab.study.consolidation", *small, "--tables")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert len(loaded) == 2
    assert "| plain | given | 0 kB | 1 |" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_model_without_a_product_key_memory_is_refused(made_up):
    made_up, folder = made_up
    model = dataclasses.replace(made_up.experiment.model, pkm_layers=())
    experiment = dataclasses.replace(made_up.experiment, model=model)
    state = init_state(model, memory=experiment.training.memory, optimizer=None, seed=0)
    bare = Run(experiment, model_graph(model), state.params, state.memory, 0)
    with pytest.raises(SystemExit, match=r"the model has no blocks.*values that can learn"):
        changes((bare, folder), WAYS["text"])


def test_all_ways_name_a_write_of_the_retention_study():
    assert {way.write for way in WAYS.values()} <= set(retention.METHODS)


def test_ways_that_are_not_known_are_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"--ways: \['none'\] are none of \('plain', "):
        run("lab.study.consolidation", "--ways", "none", "--out", tmp_path / "lines.jsonl")
