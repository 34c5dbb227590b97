"""The programs behind the measurements of many users over one base, at the smallest sizes."""

import dataclasses

import pytest

from fwpkm_jax.config import load_config
from fwpkm_jax.data import RecallData
from fwpkm_jax.rules import FwPKM
from fwpkm_jax.run import Run
from fwpkm_jax.training.state import init_state, model_graph
from lab.study import users
from tests.benchmarks.programs import result, run

pytestmark = [pytest.mark.thorough, pytest.mark.two_phase]


@pytest.fixture
def made_up(monkeypatch):
    experiment = load_config("recall")
    rule = FwPKM(num_subkeys=8, key_dim=4, value_dim=4, top_k=2)
    model = dataclasses.replace(
        experiment.model,
        fast_weight=dataclasses.replace(experiment.model.fast_weight, rule=rule, chunk_size=4),
    )
    experiment = dataclasses.replace(experiment, model=model)
    memory = experiment.training.memory
    state = init_state(model, memory=memory, optimizer=None, seed=0)
    found = Run(experiment, model_graph(model), state.params, state.memory, 0)
    monkeypatch.setattr(users, "load_run", lambda run_dir: found)
    return found


def test_users_are_asked_for_their_own_and_for_others_facts(made_up, tmp_path):
    fresh = ("--subkeys", 6)
    for slots in (64, 36):
        out = tmp_path / f"{slots}.json"
        sizes = ("--users", 3, "--facts", 40, "--filler", 1, "--private", 2, "--seed", 1)
        run(
            "lab.study.users",
            "--run",
            "x",
            *sizes,
            "--capacity",
            slots,
            "--out",
            out,
            *(fresh if slots == 36 else ()),
        )
        found = result(out)
        assert found["own_facts"]["answers"] == 3 * 40
        assert found["tokens"] == 3 * 40
        assert found["slots"] == slots
        assert found["private_memories_answer_alike"]
        asked = sum(
            found[f"next_users_facts_{name}"]["answers"]
            for name in ("never_stated", "stated_otherwise")
        )
        assert asked <= 3 * 40
        assert 0 < found["rows"]["mean"] <= found["rows"]["most"] <= slots
        assert found["kilobytes"]["private_table"] == slots * 4 * 4 / 1e3
    with pytest.raises(ValueError, match="facts=65"):
        run("lab.study.users", "--run", "x", "--facts", 65)


def test_facts_are_stated_once_and_next_users_differ():
    data = RecallData(num_keys=8, num_values=64, num_facts=4, num_filler=16, length=128)
    options = users.Options(run=None, users=3, facts=5, filler=2)  # pyright: ignore
    texts, values = users.make_facts(options, data)
    for text, own in zip(texts, values, strict=True):
        keys = text[2::4] - data.first_key
        assert sorted(keys) == sorted((own >= 0).nonzero()[0])
        assert (text[3::4] == own[keys]).all()
    assert (values[0] != values[1]).any()
