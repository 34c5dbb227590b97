"""Users in seats get, bit for bit, what each gets alone there, whoever comes and goes."""

import dataclasses
import functools
import re
import types
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax import nnx

import fwpkm_jax
from fwpkm_jax import memories
from fwpkm_jax.generation import (
    Sampling,
    generate,
    init_generation,
    join,
    leave,
    open_seats,
    step,
)
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.overlays import overlay_use, refuse_lost, to_private
from fwpkm_jax.rules import FwPKM
from tests.memories.models import EVERY, make_model, with_rule
from tests.models.test_overlays import CONFIG, NAME, model_and_base

SEATS, CAPACITY, LENGTH = 3, 36, 64
DRAW = Sampling(temperature=1.0)
PROMPTS = {
    name: np.random.default_rng(number).integers(11, size=3 + 2 * number)
    for number, name in enumerate(("alice", "bob", "carol", "dave"))
}
KEYS = {name: jax.random.key(number) for number, name in enumerate(PROMPTS)}
COMPANY = (  # alice leaves her seat to dave; bob is saved, and comes back to another seat.
    *("+alice", "3", "+bob", "2", "+carol", "5", "-alice", "+dave", "4", "-bob", "1"),
    *("-dave", "+bob", "6", "-carol", "2", "-bob"),
)


def opened(model=None, base=None, **options):
    if model is None or base is None:
        model, base = model_and_base()
    options = {"seats": SEATS, "capacity": CAPACITY, "max_length": LENGTH} | options
    return model, open_seats(model, base, **options)


def saved_and_restored(model, user, folder):
    """Its memory comes back private."""
    memories.save(folder, "user", user, model=model)
    return memories.load(folder, "user", model)


def play(events, *, model, seats, keep=lambda user: user, prompts=PROMPTS):
    """What each user got, token by token, and the users who left."""
    at, answers, left = {}, {name: [] for name in prompts}, {}
    for event in events:
        name = event[1:]
        if event[0] == "+":
            user = keep(left[name]) if name in left else None
            prompt = None if user else prompts[name]
            seats, at[name] = join(model, seats, prompt, user=user, rng=KEYS[name])
        elif event[0] == "-":
            seats, left[name] = leave(seats, at.pop(name))
        else:
            out = step(model, seats, tokens=int(event), sampling=DRAW)
            seats = out.seats
            for name, seat in at.items():
                answers[name] += zip(out.tokens[seat], out.log_probs[seat], strict=True)
            empty = np.setdiff1d(np.arange(SEATS), list(at.values()))
            assert (out.tokens[empty] == -1).all()
            assert not out.waiting[empty].any()
            assert out.waiting[list(at.values())].all()
    return answers, left


@functools.cache
def company():
    model, seats = opened()
    return play(COMPANY, model=model, seats=seats, keep=to_private)


@functools.cache
def alone(name):
    """In the first of empty seats, in steps of other sizes."""
    model, seats = opened()
    present = COMPANY[COMPANY.index(f"+{name}") :]
    tokens, here = 0, True
    for event in present:
        here = {f"+{name}": True, f"-{name}": False}.get(event, here)
        tokens += int(event) if here and event.isdigit() else 0
    return play((f"+{name}", str(tokens - 1), "1", f"-{name}"), model=model, seats=seats)


@pytest.mark.parametrize("name", PROMPTS)
def test_a_user_in_company_gets_what_it_gets_alone_bit_for_bit(name):
    (answers, left), (expected, left_alone) = company(), alone(name)
    assert answers[name] == expected[name]
    assert len(answers[name]) > CONFIG.fast_weight.chunk_size, "no chunk was written"
    user, before = left[name], model_and_base()[1][NAME].values
    assert overlay_use(user.stream.memory)[NAME].rows[0] > 0
    user, lone = (to_private(x) for x in (user, left_alone[name]))
    chex.assert_trees_all_equal(user.stream.memory, lone.stream.memory)
    chex.assert_trees_all_equal(user, lone)
    assert (user.stream.memory[NAME].values != before).any(axis=-1).sum() > 8


def test_another_users_tokens_and_memory_change_no_bit_of_mine():
    model, seats = opened()
    events = ("+bob", "1", "+alice", "7", "-alice", "-bob")
    first, left = play(events, model=model, seats=seats)
    other = PROMPTS | {"bob": PROMPTS["carol"]}
    second, changed = play(events, model=model, seats=opened()[1], prompts=other)
    assert first["bob"] != second["bob"]
    assert first["alice"] == second["alice"]
    chex.assert_trees_all_equal(left["alice"], changed["alice"])


def test_joining_leaving_and_steps_of_any_size_compile_nothing_more(caplog):
    company()
    with jax.log_compiles():
        model, seats = opened()
        caplog.clear()
        play(COMPANY, model=model, seats=seats)
        play(("+dave", "9", "+alice", "5"), model=model, seats=opened()[1])
    assert [x.message for x in caplog.records if "Compiling" in x.message] == []


@pytest.mark.thorough
def test_a_saved_memory_goes_on_as_if_it_had_stayed(tmp_path):
    keep = functools.partial(saved_and_restored, model_and_base()[0], folder=tmp_path)
    model, seats = opened()
    answers, left = play(COMPANY, model=model, seats=seats, keep=keep)
    expected, stayed = company()
    assert answers == expected
    chex.assert_trees_all_equal(to_private(left["bob"]), to_private(stayed["bob"]))


@pytest.mark.thorough
def test_seats_generate_the_tokens_of_generate():
    model, base = model_and_base()
    for name, prompt in PROMPTS.items():
        state = init_generation(model, base, batch=1, max_length=LENGTH)
        expected = len(company()[0][name])
        out = generate(
            *(model, [prompt], state),
            max_new_tokens=expected,
            sampling=DRAW,
            rng=KEYS[name],
        )
        tokens, log_probs = zip(*company()[0][name], strict=True)
        np.testing.assert_array_equal(tokens, out.tokens[0])
        np.testing.assert_allclose(log_probs, out.log_probs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow_cases("mixers")
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mixers", "fwmlp"])
def test_caches_of_all_kinds_and_private_memories_can_sit(name):
    """All that a state holds of a user moves with it."""
    if name == "fwmlp":  # Arbitrary numbers would let it diverge.
        model = LanguageModel(with_rule(name), rngs=nnx.Rngs(0))
    else:
        mixers = ("gdn", "attention", "lact", "titans_mac", "retnet")
        model = make_model(dataclasses.replace(EVERY, mixers=mixers))
    base = model.init_memory(jax.random.key(1))
    options = {"capacity": None, "max_length": LENGTH}
    runs = []
    for events in (("+alice", "2", "+bob", "5", "-alice", "+alice", "2", "-bob", "4", "-alice"),
                   ("+bob", "5", "-bob"), ("+alice", "13", "-alice")):  # fmt: skip
        _, seats = opened(model, base, **options)
        runs.append(play(events, model=model, seats=seats))
    for (answers, left), name in zip(runs[1:], ("bob", "alice"), strict=True):
        assert [x for x, _ in runs[0][0][name][: len(answers[name])]] == [
            x for x, _ in answers[name]
        ]
        if name == "alice":
            chex.assert_trees_all_equal(runs[0][1][name], left[name])


def test_a_user_who_loses_rows_ends_and_the_others_go_on():
    model, seats = opened()
    seats, alice = join(model, seats, PROMPTS["alice"], rng=KEYS["alice"])
    seats, bob = join(model, seats, PROMPTS["bob"], rng=KEYS["bob"])
    values = seats.state.stream.memory[NAME].values
    values = values._replace(lost=values.lost.at[alice].set(2))
    memory = {NAME: seats.state.stream.memory[NAME]._replace(values=values)}
    stream = seats.state.stream._replace(memory=memory)
    seats = seats._replace(state=seats.state._replace(stream=stream))
    out = step(model, seats, tokens=3, sampling=DRAW)
    assert out.failed.tolist() == [seat == alice for seat in range(SEATS)]
    assert out.waiting.tolist() == [seat == bob for seat in range(SEATS)]
    assert (out.tokens[bob] >= 0).all()
    _, lossy = leave(out.seats, alice)
    with pytest.raises(ValueError, match="capacity=36 rows of each user, and user 0 lost 2"):
        refuse_lost(lossy)


@pytest.mark.thorough
@pytest.mark.parametrize("prompt", [None, [1]])
def test_a_stop_token_ends_a_user_until_it_joins_again(prompt):
    model, seats = opened()
    seats, bob = join(model, seats, PROMPTS["bob"])
    seats, carol = join(model, seats, PROMPTS["carol"])
    first = step(model, seats, tokens=1)
    stop = int(first.tokens[bob, 0])
    assert stop != first.tokens[carol, 0], "the example shows both"
    seats, carol = join(model, leave(first.seats, carol).seats, PROMPTS["carol"])
    seats, again = join(model, seats, PROMPTS["bob"])
    out = step(model, seats, tokens=2, stop_ids=[stop])
    assert out.tokens[again].tolist() == [stop, -1]
    assert not out.waiting[again]
    seats, user = leave(out.seats, again)
    assert user.finished.tolist() == [True]
    seats, seat = join(model, seats, prompt, user=user)
    assert step(model, seats, tokens=1).tokens[seat, 0] >= 0


def refused(changes):
    model, seats = opened()
    seats, alice = join(model, seats, PROMPTS["alice"])
    what = changes.get("what")
    if what == "full":
        for _ in range(SEATS):
            seats, _ = join(model, seats, [1])
    elif what == "silent":
        join(model, seats, None)
    elif what == "leave":
        leave(seats, changes["seat"])
    elif what == "other base":
        memory = model.init_memory(jax.random.key(2))
        other = open_seats(model, memory, seats=2, capacity=CAPACITY, max_length=LENGTH)
        join(model, seats, None, user=leave(*join(model, other, [1])).user)
    elif what == "two":
        memory = model.init_memory(jax.random.key(1), groups=2)
        join(model, seats, [1], user=init_generation(model, memory, batch=2, max_length=LENGTH))
    elif what == "chunk":
        memory = model.init_memory(jax.random.key(1))
        user = init_generation(model, memory, batch=1, max_length=LENGTH, max_chunk_size=9)
        join(model, seats, [1], user=user)
    elif what == "open":
        opened(**changes["options"])
    else:
        step(model, seats, **changes)
    assert alice == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"what": "full"}, "All 3 seats are taken; let a user leave first"),
        ({"what": "silent"}, "A user needs a token to continue from; give it a prompt"),
        ({"what": "leave", "seat": 1}, r"seat=1 is not taken; these are: \[0\]"),
        ({"what": "leave", "seat": -3}, r"seat=-3 is not taken"),
        ({"what": "other base"}, "These memories have different bases"),
        ({"what": "two"}, "user holds 2 sequences; a seat takes one"),
        ({"what": "chunk"}, r"user has .*pending.* of float32\[1, 1, 10, 2, 8\], and a seat"),
        ({"what": "open", "options": {"seats": 1}}, "seats=1 must be at least 2"),
        (
            {"what": "open", "options": {"capacity": 37}},
            "capacity=37 must lie between 1 and the 36",
        ),
        ({"tokens": 0}, "tokens=0 must lie between 1 and 256"),
        ({"tokens": 257}, "tokens=257 must lie between 1 and 256"),
        ({"stop_ids": [11]}, r"stop_ids=\(11,\) must lie between 0 and 10"),
        ({"sampling": DRAW}, "temperature=1.0 draws tokens, and the user in seat 0 joined without"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        refused(changes)


@pytest.mark.thorough
def test_full_attention_keeps_what_each_user_reads():
    model = make_model(dataclasses.replace(EVERY, mixers=("attention",)))
    base = model.init_memory(jax.random.key(1))
    _, seats = opened(model, base, max_length=8)
    seats, _ = join(model, seats, [1, 2, 3])
    out = step(model, seats, tokens=5)
    with pytest.raises(ValueError, match="max_length=8 tokens, and the user in seat 0 may reach 9"):
        step(model, out.seats, tokens=1)
    seats, user = leave(out.seats, 0)
    assert user.num_read.tolist() == [8]
    seats, _ = join(model, seats, [1, 2])
    assert (step(model, seats, tokens=2).tokens[0] >= 0).all()


@pytest.mark.thorough
def test_the_pages_code_runs(tmp_path, monkeypatch, capsys):
    """Every block of docs/howto/many_users.md in order, with a tiny model of bytes as the run."""
    page = Path(__file__).parents[2] / "docs" / "howto" / "many_users.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    rule = FwPKM(num_subkeys=46, key_dim=8, value_dim=5, top_k=2)  # More slots than the page's.
    config = dataclasses.replace(
        CONFIG,
        vocab_size=256,
        mixers=("swa", "swa"),
        memory_layers=(1,),
        fast_weight=FastWeightConfig(rule=rule, chunk_size=4),
    )
    model = make_model(config)
    run = types.SimpleNamespace(model=model, memory=model.init_memory(jax.random.key(0), groups=2))
    monkeypatch.setattr(fwpkm_jax, "load_run", lambda folder: run)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"prompts": [[1]] * 100}
    exec(code, names)
    assert memories.names(tmp_path / "memories") == ("alice",)
    assert names["seats"].taken.sum() == 2
    assert len(capsys.readouterr().out.splitlines()) >= 6
    read = int(names["seats"].state.num_read[names["alice"]])
    assert read == len("My name is Alice. ") + 20 + len(" My name is ")
