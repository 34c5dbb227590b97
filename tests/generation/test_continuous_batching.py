"""Users in a batch get, bit for bit, what each gets alone there, whoever comes and goes."""

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
    open_batch,
    step,
)
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.overlays import overlay_use, refuse_lost, to_private
from fwpkm_jax.rules import FwPKM
from tests.memories.models import EVERY, make_model, with_rule
from tests.models.test_overlays import CONFIG, NAME, model_and_base

BATCH_SLOTS, CAPACITY, LENGTH = 3, 36, 64
DRAW = Sampling(temperature=1.0)
PROMPTS = {
    name: np.random.default_rng(number).integers(11, size=3 + 2 * number)
    for number, name in enumerate(("alice", "bob", "carol", "dave"))
}
KEYS = {name: jax.random.key(number) for number, name in enumerate(PROMPTS)}
COMPANY = (  # alice leaves her slot to dave; bob is saved, and comes back to another slot.
    *("+alice", "3", "+bob", "2", "+carol", "5", "-alice", "+dave", "4", "-bob", "1"),
    *("-dave", "+bob", "6", "-carol", "2", "-bob"),
)


def opened(model=None, base=None, **options):
    if model is None or base is None:
        model, base = model_and_base()
    options = {"batch_slots": BATCH_SLOTS, "capacity": CAPACITY, "max_length": LENGTH} | options
    return model, open_batch(model, base, **options)


def saved_and_restored(model, user, folder):
    """Its memory comes back private."""
    memories.save(folder, "user", user, model=model)
    return memories.load(folder, "user", model)


def play(events, *, model, batch, keep=lambda user: user, prompts=PROMPTS):
    """What each user got, token by token, and the users who left."""
    at, answers, left = {}, {name: [] for name in prompts}, {}
    for event in events:
        name = event[1:]
        if event[0] == "+":
            user = keep(left[name]) if name in left else None
            prompt = None if user else prompts[name]
            batch, at[name] = join(model, batch, prompt, user=user, rng=KEYS[name])
        elif event[0] == "-":
            batch, left[name] = leave(batch, at.pop(name))
        else:
            out = step(model, batch, tokens=int(event), sampling=DRAW)
            batch = out.batch
            for name, batch_slot in at.items():
                answers[name] += zip(out.tokens[batch_slot], out.log_probs[batch_slot], strict=True)
            empty = np.setdiff1d(np.arange(BATCH_SLOTS), list(at.values()))
            assert (out.tokens[empty] == -1).all()
            assert not out.waiting[empty].any()
            assert out.waiting[list(at.values())].all()
    return answers, left


@functools.cache
def company():
    model, batch = opened()
    return play(COMPANY, model=model, batch=batch, keep=to_private)


@functools.cache
def alone(name):
    """In the first of empty batch, in steps of other sizes."""
    model, batch = opened()
    present = COMPANY[COMPANY.index(f"+{name}") :]
    tokens, here = 0, True
    for event in present:
        here = {f"+{name}": True, f"-{name}": False}.get(event, here)
        tokens += int(event) if here and event.isdigit() else 0
    return play((f"+{name}", str(tokens - 1), "1", f"-{name}"), model=model, batch=batch)


@pytest.mark.slow_cases("bob")
@pytest.mark.thorough("bob", "carol", "dave")
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


@pytest.mark.thorough
def test_another_users_tokens_and_memory_change_no_bit_of_mine():
    model, batch = opened()
    events = ("+bob", "1", "+alice", "7", "-alice", "-bob")
    first, left = play(events, model=model, batch=batch)
    other = PROMPTS | {"bob": PROMPTS["carol"]}
    second, changed = play(events, model=model, batch=opened()[1], prompts=other)
    assert first["bob"] != second["bob"]
    assert first["alice"] == second["alice"]
    chex.assert_trees_all_equal(left["alice"], changed["alice"])


@pytest.mark.thorough
def test_joining_leaving_and_steps_of_any_size_compile_nothing_more(caplog):
    company()
    with jax.log_compiles():
        model, batch = opened()
        caplog.clear()
        play(COMPANY, model=model, batch=batch)
        play(("+dave", "9", "+alice", "5"), model=model, batch=opened()[1])
    assert [x.message for x in caplog.records if "Compiling" in x.message] == []


@pytest.mark.thorough
def test_a_saved_memory_goes_on_as_if_it_had_stayed(tmp_path):
    keep = functools.partial(saved_and_restored, model_and_base()[0], folder=tmp_path)
    model, batch = opened()
    answers, left = play(COMPANY, model=model, batch=batch, keep=keep)
    expected, stayed = company()
    assert answers == expected
    chex.assert_trees_all_equal(to_private(left["bob"]), to_private(stayed["bob"]))


@pytest.mark.slow
def test_a_batch_generates_the_tokens_of_generate():
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


@pytest.mark.slow
@pytest.mark.slow_cases("mixers")
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
        _, batch = opened(model, base, **options)
        runs.append(play(events, model=model, batch=batch))
    for (answers, left), name in zip(runs[1:], ("bob", "alice"), strict=True):
        assert [x for x, _ in runs[0][0][name][: len(answers[name])]] == [
            x for x, _ in answers[name]
        ]
        if name == "alice":
            chex.assert_trees_all_equal(runs[0][1][name], left[name])


@pytest.mark.thorough
def test_a_user_who_loses_rows_ends_and_the_others_go_on():
    model, batch = opened()
    batch, alice = join(model, batch, PROMPTS["alice"], rng=KEYS["alice"])
    batch, bob = join(model, batch, PROMPTS["bob"], rng=KEYS["bob"])
    values = batch.state.stream.memory[NAME].values
    values = values._replace(lost=values.lost.at[alice].set(2))
    memory = {NAME: batch.state.stream.memory[NAME]._replace(values=values)}
    stream = batch.state.stream._replace(memory=memory)
    batch = batch._replace(state=batch.state._replace(stream=stream))
    out = step(model, batch, tokens=3, sampling=DRAW)
    assert out.failed.tolist() == [batch_slot == alice for batch_slot in range(BATCH_SLOTS)]
    assert out.waiting.tolist() == [batch_slot == bob for batch_slot in range(BATCH_SLOTS)]
    assert (out.tokens[bob] >= 0).all()
    _, lossy = leave(out.batch, alice)
    with pytest.raises(ValueError, match="capacity=36 rows of each user, and user 0 lost 2"):
        refuse_lost(lossy)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [None, [1]])
def test_a_stop_token_ends_a_user_until_it_joins_again(prompt):
    model, batch = opened()
    batch, bob = join(model, batch, PROMPTS["bob"])
    batch, carol = join(model, batch, PROMPTS["carol"])
    first = step(model, batch, tokens=1)
    stop = int(first.tokens[bob, 0])
    assert stop != first.tokens[carol, 0], "the example shows both"
    batch, carol = join(model, leave(first.batch, carol).batch, PROMPTS["carol"])
    batch, again = join(model, batch, PROMPTS["bob"])
    out = step(model, batch, tokens=2, sampling=Sampling(stop_ids=[stop]))
    assert out.tokens[again].tolist() == [stop, -1]
    assert not out.waiting[again]
    batch, user = leave(out.batch, again)
    assert user.finished.tolist() == [True]
    batch, batch_slot = join(model, batch, prompt, user=user)
    assert step(model, batch, tokens=1).tokens[batch_slot, 0] >= 0


def refused(changes):
    model, batch = opened()
    batch, alice = join(model, batch, PROMPTS["alice"])
    what = changes.get("what")
    if what == "full":
        for _ in range(BATCH_SLOTS):
            batch, _ = join(model, batch, [1])
    elif what == "silent":
        join(model, batch, None)
    elif what == "leave":
        leave(batch, changes["batch_slot"])
    elif what == "other base":
        memory = model.init_memory(jax.random.key(2))
        other = open_batch(model, memory, batch_slots=2, capacity=CAPACITY, max_length=LENGTH)
        join(model, batch, None, user=leave(*join(model, other, [1])).user)
    elif what == "two":
        memory = model.init_memory(jax.random.key(1), groups=2)
        join(model, batch, [1], user=init_generation(model, memory, batch=2, max_length=LENGTH))
    elif what == "chunk":
        memory = model.init_memory(jax.random.key(1))
        user = init_generation(model, memory, batch=1, max_length=LENGTH, max_chunk_size=9)
        join(model, batch, [1], user=user)
    elif what == "open":
        opened(**changes["options"])
    else:
        step(model, batch, **changes)
    assert alice == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"what": "full"}, "All 3 batch slots are taken; let a user leave first"),
        ({"what": "silent"}, "A user needs a token to continue from; give it a prompt"),
        ({"what": "leave", "batch_slot": 1}, r"batch_slot=1 is not taken; these are: \[0\]"),
        ({"what": "leave", "batch_slot": -3}, r"batch_slot=-3 is not taken"),
        ({"what": "other base"}, "These memories have different bases"),
        ({"what": "two"}, "user holds 2 sequences; a batch slot takes one"),
        ({"what": "chunk"}, r"user has .*pending.* of float32\[1, 1, 10, 2, 8\], and a batch slot"),
        ({"what": "open", "options": {"batch_slots": 1}}, "batch_slots=1 must be at least 2"),
        (
            {"what": "open", "options": {"capacity": 37}},
            "capacity=37 must lie between 1 and the 36",
        ),
        ({"tokens": 0}, "tokens=0 must lie between 1 and 256"),
        ({"tokens": 257}, "tokens=257 must lie between 1 and 256"),
        ({"sampling": Sampling(stop_ids=[11])}, r"stop_ids=\(11,\) must lie between 0 and 10"),
        (
            {"sampling": DRAW},
            "temperature=1.0 draws tokens, and the user in batch slot 0 joined without",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        refused(changes)


@pytest.mark.slow
def test_full_attention_keeps_what_each_user_reads():
    model = make_model(dataclasses.replace(EVERY, mixers=("attention",)))
    base = model.init_memory(jax.random.key(1))
    _, batch = opened(model, base, max_length=8)
    batch, _ = join(model, batch, [1, 2, 3])
    out = step(model, batch, tokens=5)
    with pytest.raises(
        ValueError, match="max_length=8 tokens, and the user in batch slot 0 may reach 9"
    ):
        step(model, out.batch, tokens=1)
    batch, user = leave(out.batch, 0)
    assert user.num_read.tolist() == [8]
    batch, _ = join(model, batch, [1, 2])
    assert (step(model, batch, tokens=2).tokens[0] >= 0).all()


@pytest.mark.slow
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
    assert names["batch"].taken.sum() == 2
    assert len(capsys.readouterr().out.splitlines()) >= 6
    read = int(names["batch"].state.num_read[names["alice"]])
    assert read == len("My name is Alice. ") + 20 + len(" My name is ")
