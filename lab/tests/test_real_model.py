"""Sessions of facts: forms and words of training and test are apart, and a run is asked rightly."""

import importlib
import json
import random
import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from fwpkm_jax import LanguageModel
from fwpkm_jax.config import Experiment
from fwpkm_jax.data import TextData
from fwpkm_jax.data.sessions import Answer, SessionRow
from fwpkm_jax.interchange import smollm2
from fwpkm_jax.interchange.imported_run import start_run
from fwpkm_jax.interchange.weights import Weights
from fwpkm_jax.layers.mixers import AttentionConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.run import Run
from fwpkm_jax.run.load import IMPORTED
from lab.real_model import costs, evaluate, grammar, made_sessions, passages
from tests.benchmarks.programs import run
from tests.evaluation.conftest import tiny_model_config

ASKED = {"question": "Where did Bo sit?", "answer": " mat", "about": "Bo sat on the"}


@pytest.fixture
def tokenizer_json(tmp_path):
    letters = "abcdefghijklmnop"
    words = [f"{a}{b}ro{c}" for a in letters for b in "aeiou" for c in letters]
    vocabulary = {f"\u0120{word}": number for number, word in enumerate(words)}
    vocabulary |= {f"\u0120{word.capitalize()}": -1 for word in words}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return path


def make(path, **new):
    return grammar.Grammar(path, ["A book."], **new)


def test_a_session_states_what_it_asks_and_none_comes_twice(tokenizer_json):
    made = make(tokenizer_json, new_forms=False, new_words=False)
    seen = set()
    for number in range(20):
        session = made.session(random.Random(number), facts=8, asked=8, chat=0.5)
        told = [one for one in session.told if isinstance(one, grammar.Fact)]
        assert len(told) >= 8
        assert len(session.asked) == 8
        for question in session.asked:
            fact = session.told[question.fact]
            assert fact.value == question.answer
            assert not {"N", "R", "V", "P"} & set(fact.before.split())
        text = json.dumps(grammar.record(session, random.Random(0)))
        assert text not in seen
        seen.add(text)


def test_a_session_of_drawn_verbs_and_nouns_states_what_it_asks(tokenizer_json):
    made = make(tokenizer_json, new_forms=False, new_words=False, wide=0.9)
    joined = 0
    for number in range(40):
        session = made.session(random.Random(number), facts=8, asked=8, chat=0.5)
        for question in session.asked:
            fact = session.told[question.fact]
            assert fact.value == question.answer
            assert not {*"NRVPSW"} & set(f"{fact.before} {fact.after} {question.text}".split())
        joined += sum(
            one.after in (",", ";", " and", "")
            for one in session.told
            if isinstance(one, grammar.Fact)
        )
        grammar.record(session, random.Random(0))
    assert joined > 20


@pytest.mark.parametrize("new_forms", [False, True])
def test_drawn_forms_of_the_test_are_not_those_of_training(tokenizer_json, new_forms):
    made = make(tokenizer_json, new_forms=new_forms, new_words=False, wide=0.9)
    drawn = [made._drawn.draw(random.Random(number)) for number in range(200)]
    forms = [form for one in drawn for form in (*one.statements, *one.questions)]
    assert all(grammar.kept(form) == new_forms for form in forms)
    assert len(set(forms)) > 0.9 * len(forms) > 200


def test_a_session_of_passages_tells_what_it_asks(tokenizer_json):
    train, test = (
        make(tokenizer_json, new_forms=new, new_words=new, passages=1.0) for new in (False, True)
    )
    assert not {one.text for one in train._passages} & {one.text for one in test._passages}
    for number in range(40):
        session = train.session(random.Random(number), facts=8, asked=8, chat=0.5)
        assert len(session.asked) == 8
        for question in session.asked:
            text = session.told[question.fact]
            assert f"{question.about} {question.answer}" in text
            assert "{" not in text + question.text
        row = grammar.record(session, random.Random(0))["rows"][1]
        asked = row.get("questions") or [x for x in row["messages"] if x["role"] == "assistant"]
        assert [one["about"] for one in asked] == [one.about for one in session.asked]


def test_all_passages_can_be_filled_and_a_line_that_is_none_is_named():
    def drawn(rng):
        return f"x{rng.randrange(10**6)}"

    found = passages.read_passages(passages.PASSAGES.read_text())
    kinds = passages.draws(drawn, drawn, drawn)
    lost = 0
    for passage in found:
        text, asked = passages.fill_passage(passage, random.Random(0), kinds)
        assert asked
        lost += len(passage.asked) - len(asked)  # Behind a quotation mark, or told twice.
        for one in asked:
            assert f"{one.about} {one.answer}" in text
    assert lost < 0.01 * sum(len(passage.asked) for passage in found)
    assert len({passage.text for passage in found}) == len(found)
    few = passages.draws(lambda rng: "wax", drawn, drawn)
    with pytest.raises(ValueError, match=r"1000 draws gave no new .w2.; name a larger vocabulary"):
        [passages.fill_passage(passage, random.Random(0), few) for passage in found]
    with pytest.raises(ValueError, match=r"'[?] Who came' is no question of a passage"):
        passages.read_passages("{n1} came.\n? Who came")


def test_words_and_forms_of_the_test_are_not_those_of_training(tokenizer_json):
    train = make(tokenizer_json, new_forms=False, new_words=False)
    test = make(tokenizer_json, new_forms=True, new_words=True)
    assert not set(train._low) & set(test._low)
    assert not set(train._high) & set(test._high)
    for name in ("own statement", "own question", "my statement", "opening", "tail"):
        assert not set(train._parts[name]) & set(test._parts[name])


@pytest.mark.parametrize(("owners", "people"), [("one", 1), ("alike", 2)])
def test_a_session_tells_of_one_person_or_of_two_alike(tokenizer_json, owners, people):
    made = make(tokenizer_json, new_forms=False, new_words=False, owners=owners)
    made._name = lambda rng: "Quilo"
    for number in range(5):
        session = made.session(random.Random(number), facts=8, asked=8, chat=0.5)
        assert len(session.asked) == 8
        named = [set(re.findall("Quil[a-z]", x.text)) for x in session.asked]
        assert all(named), session.asked
        assert len(set().union(*named)) == people, named


def test_corrected_facts_are_asked_for_the_new_value_or_the_old(tokenizer_json):
    sessions = [
        make(tokenizer_json, new_forms=False, new_words=False, corrected=which).session(
            random.Random(5), facts=8, asked=8, chat=0.5
        )
        for which in ("new", "old")
    ]
    new, old = sessions
    assert new.told == old.told
    assert [x.text for x in new.asked] == [x.text for x in old.asked]
    for after, before in zip(new.asked, old.asked, strict=True):
        assert before.fact < after.fact
        assert before.answer == new.told[before.fact].value
        assert after.answer == new.told[after.fact].value


class Parrot:
    """Says what was read first, token by token."""

    def start(self, sessions):
        return [np.zeros(0, int)] * sessions

    def read(self, memory, rows):
        return [np.concatenate([one, row]) for one, row in zip(memory, rows, strict=True)]

    def said(self, memory, rows):
        return [
            [one[: len(x.tokens)] for x in row.answers]
            for one, row in zip(memory, rows, strict=True)
        ]


def test_what_is_told_is_asked_by_condition():
    def session(value, answer):
        ask = Answer(1, np.array([answer]), "", None)
        return [SessionRow(np.array([value, 0]), []), SessionRow(np.array([9, answer]), [ask])]

    sessions = [session(number, number + number // 4) for number in range(6)]
    found = evaluate.ask(Parrot(), sessions)
    assert found["exact"] == pytest.approx(4 / 6, abs=1e-4)
    assert (found["answers"], found["of_sessions"]) == (6, 6)
    assert found["interval"] > 0
    assert evaluate.ask(Parrot(), sessions, times=0)["exact"] == 0
    between = [np.array([7])]
    assert evaluate.ask(Parrot(), sessions, times=0, between=between)["exact"] == 0
    assert evaluate.ask(Parrot(), sessions, others=2, times=2, between=between) == found
    ((joined,), *_) = evaluate.in_context(sessions)
    assert joined.tokens.tolist() == [0, 0, 9, 0]
    assert joined.answers[0].start == 3


def test_sessions_are_written_and_asked_by_command(tokenizer_json, tmp_path, monkeypatch):
    books, sessions, lines = (tmp_path / name for name in ("books.jsonl", "s.jsonl", "out.jsonl"))
    books.write_text(
        json.dumps({"text": "It was a long and quiet morning in the old house. " * 50})
    )
    made = ("--tokenizer", tokenizer_json, "--books", books, "--out", sessions, "--sessions", 3)
    run("lab.real_model.grammar", *made, "--seed", "held-out", "--new_forms", "--new_words")
    run("lab.real_model.grammar", *made, "--wide", 0.5)
    run("lab.real_model.grammar", *made, "--passages", 1)
    run("lab.real_model.grammar", *made, "--owners", "alike", "--corrected", "new")
    assert len(sessions.read_text().splitlines()) == 3

    # Without a chat: bytes have no template of one.
    told = {"rows": [{"text": "Bo sat on the mat."}, {"questions": [ASKED]}]}
    sessions.write_text((json.dumps(told) + "\n") * 3)
    config = tiny_model_config(mixers=("swa",), memory_layers=(0,), vocab_size=300)
    graphdef, params = nnx.split(model := LanguageModel(config, rngs=nnx.Rngs(0)))
    memory = model.init_memory(nnx.Rngs(1).params(), groups=1)
    experiment = Experiment(model=config, data=TextData(train_paths=("text.txt",)))
    one = Run(experiment, graphdef, params, memory, step=0)
    monkeypatch.setattr(evaluate, "load_run", lambda folder: one)
    asked = ("--run", tmp_path, "--sessions", sessions, "--base", tmp_path, "--book", books)
    run("lab.real_model.evaluate", *asked, "--few", 2, "--out", lines)
    found = {line["condition"]: line for line in map(json.loads, lines.read_text().splitlines())}
    assert [found[name]["of_sessions"] for name in ("written", "told twice")] == [3, 2]
    assert {
        "after 2,000 tokens of a book, not told",
        "after fifty other facts, without the write that keeps",
        "the base, all in its context",
    } <= found.keys()
    assert all(line["exact"] == 0 for line in found.values())  # It has learned nothing.


def tiny_run(**changes):
    config = tiny_model_config(memory_layers=(1,), mixers=("swa",) * 3, vocab_size=300, **changes)
    graphdef, params = nnx.split(model := LanguageModel(config, rngs=nnx.Rngs(0)))
    memory = model.init_memory(nnx.Rngs(1).params(), groups=1)
    experiment = Experiment(model=config, data=TextData(train_paths=("text.txt",)))
    return Run(experiment, graphdef, params, memory, step=0)


def test_layers_computed_once_answer_as_the_whole_model():
    one = tiny_run()
    asked, model = evaluate.Asked(one), one.model
    told, row = (np.random.default_rng(n).integers(0, 300, 40, np.int32) for n in (0, 1))
    for _ in range(2):  # Computed, and found again.
        memory = asked.read(asked.start(1), [told])
    expected = model.hidden(jnp.array(told[None]), one.memory).memory
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), memory, expected)

    hidden = model.hidden(jnp.array(row[None]), expected, write=False).x
    logits = model.logits(hidden)[0]
    answers = [Answer(5, row[5:7], "", None), Answer(20, row[20:23], "", None)]
    (said,) = asked.said(memory, [SessionRow(row, answers)])
    best = np.argmax(logits, axis=-1)
    assert [one.tolist() for one in said] == [best[4:6].tolist(), best[19:22].tolist()]
    losses = -jax.nn.log_softmax(logits[:-1])[np.arange(39), row[1:]]
    np.testing.assert_allclose(asked.losses(memory, [row])[0], losses.mean(), rtol=1e-5)
    empty = asked.losses(asked.start(1), [row])[0]
    assert abs(empty - losses.mean()) > 1e-4


def test_costs_are_measured(tmp_path, monkeypatch):
    sessions, books, lines = (tmp_path / name for name in ("s.jsonl", "books.jsonl", "out.jsonl"))
    told = {"rows": [{"text": "Bo sat on the mat."}, {"questions": [ASKED]}]}
    sessions.write_text((json.dumps(told) + "\n") * 3)
    books.write_text((json.dumps({"text": "A long and quiet morning. " * 150}) + "\n") * 3)
    one = tiny_run()
    monkeypatch.setattr(costs, "load_run", lambda folder: one)
    asked = ("--run", tmp_path, "--base", tmp_path, "--sessions", sessions, "--books", books)
    run("lab.real_model.costs", *asked, "--texts", 2, "--tokens", 3, "--out", lines)
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [x["what"] for x in found] == ["time per token"] * 2 + ["slots"] + ["loss of text"] * 3
    slots, empty, *written = found[2:]
    assert 0 < slots["least"] <= slots["mean"] <= slots["of"] == 16
    assert empty["more"] == 0  # Here the base is the same model.
    assert all(abs(x["more"]) > 1e-4 for x in written)


def test_a_chat_is_told_quit_and_asked(tmp_path, monkeypatch):
    talks, lines = tmp_path / "talks.jsonl", tmp_path / "out.jsonl"
    talks.write_text(json.dumps({"told": ["Bo sits."], "asked": {"Who sits?": "Bo", "Why?": "x"}}))
    typed = []

    def chat(command, *, input, **options):
        options = dict(pairwise(command))
        memory = Path(options["--memories"]) / f"{options['--memory']}.safetensors"
        memory.write_text(input)
        typed.append((memory.stem, input, options["--max_new_tokens"]))
        back = "Back at 0 tokens read.\n"
        said = f"Bo\n or so.\n{back}Me\n{back}" if "?" in input else "\n"
        return subprocess.CompletedProcess(
            command, 0, f"{memory.stem}: 0 tokens read.\n{said}end\n"
        )

    monkeypatch.setattr(subprocess, "run", chat)
    asked = ("--run", tmp_path, "--conversations", talks, "--answer_tokens", 4, "--out", lines)
    run("lab.real_model.chats", *asked)
    questions = "Who sits?\n/forget\nWhy?\n/forget\n"
    told = "Bo sits.\n"
    assert typed == [("empty", questions, "4"), ("told0", told, "0"), ("told0", questions, "4")]
    (found,) = map(json.loads, lines.read_text().splitlines())
    assert found["said"] == found["not_written"] == ["Bo or so.", "Me"]
    assert found["bytes"] == len(told)


class Tiny(NamedTuple):
    """A run of a tiny model, sessions, and weights of a memory for it."""

    base: Path
    rows: Path
    weights: Path
    arrays: dict[str, np.ndarray]

    @property
    def own(self):
        return [x for x in self.arrays if "/memory" in x or x.endswith("/keys")]


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    rule = replace(smollm2.MEMORY.rule, num_subkeys=4, key_dim=8, value_dim=8, top_k=2)
    monkeypatch.setattr(smollm2, "MEMORY", replace(smollm2.MEMORY, rule=rule))
    monkeypatch.setattr(smollm2, "LAYER", 1)  # Of two.
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*letters, *(f"\u0120{a}ro{b}en" for a in "bdgkm" for b in "bdgkm")]
    vocabulary += [f"\u0120{a}ro{b}en" for a in "BDGKM" for b in "bdgkm"]
    words = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    base = tmp_path / "base"
    folder = base / IMPORTED
    folder.mkdir(parents=True)
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    config = {"eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    books = tmp_path / "books.jsonl"
    books.write_text(json.dumps({"text": "The rain had stopped at last, and all went home. " * 60}))
    rows = tmp_path / "rows.npz"
    made = (
        *("--out", rows, "--tokenizer", folder / "tokenizer.json", "--books", books),
        *("--sessions", 250, "--labels", 3000, "--processes", 1, "--seed", 3),
    )
    tested = ("--new_forms", "--new_words", "--wide", 0, "--of_books", 0)
    run("lab.real_model.made_sessions", *made, *tested)
    run("lab.real_model.made_sessions", *made, "--of_books", 0.5, "--recurring")
    weights = np.unique(np.load(rows)["loss_weight"].astype(float))
    assert np.isclose(weights[:, None], [0, 0.05, 0.3, 1], atol=1e-3).any(0).all()
    run("lab.real_model.made_sessions", *made, "--wide", 0.3, "--of_books", 0.1, "--passages", 0.1)
    with pytest.raises(ValueError, match="labels=50: 0 of 1000 sessions fit"):
        run("lab.real_model.made_sessions", *made, "--labels", 50, "--of_books", 0)
    source = made_sessions.MadeSessions(length=3000, file=str(rows), vocabulary=400)
    train, valid = (source.source(split=split, seed=0) for split in ("train", "valid"))
    assert len(valid) == made_sessions.VALIDATION
    # From the first again.
    assert np.array_equal(train[0]["tokens"], train[250 - len(valid)]["tokens"])
    of_books = 0
    for row in (valid[number] for number in range(len(valid))):
        places = np.flatnonzero(row["answer_distance"])
        labels = row["tokens"][1:]
        told = places - row["answer_distance"][places]
        np.testing.assert_array_equal(labels[told], labels[places])
        assert (row["loss_weight"][places] == 1).all()
        of_books += not len(places)
    assert 0 < of_books < 20

    attention = AttentionConfig(
        num_heads=2, num_kv_heads=1, head_dim=8, gated=False, qk_norm="none", rotary_fraction=1.0
    )
    model = ModelConfig(
        vocab_size=len(words) + 1,
        model_dim=16,
        mlp_dim=8,
        mixers=("attention",) * 2,
        attention=replace(attention, norm_offset=False),
        activation_dtype="float32",
        norm_eps=1e-5,
        norm_offset=False,
    )
    llama = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 8}
    llama |= {"vocab_size": model.vocab_size, "num_attention_heads": 2, "num_key_value_heads": 1}
    llama |= {"rms_norm_eps": model.norm_eps, "rope_theta": model.attention.rope_theta}
    (folder / "config.json").write_text(json.dumps(llama | {"tie_word_embeddings": True}))
    shutil.move(folder, tmp_path / "imported")
    data = TextData(tokenizer=str(folder / "tokenizer.json"), train_paths=("a.txt",), length=8)
    whole = LanguageModel(smollm2.model_with_memory(model, smollm2.MEMORY), rngs=nnx.Rngs(0))
    arrays = Weights(nnx.state(whole), whole.init_memory(jax.random.key(0), groups=1)).named()
    params = nnx.state(LanguageModel(model, rngs=nnx.Rngs(0)))
    base.rmdir()
    start_run(
        Experiment(model=model, data=data, run_dir=str(base)),
        Weights(params, {}),
        add=lambda new: shutil.copytree(tmp_path / "imported", new / IMPORTED),
    )
    made_of = Tiny(base, rows, tmp_path / "memory.safetensors", arrays)
    save_file({name: np.array(arrays[name]) for name in made_of.own}, made_of.weights)
    monkeypatch.setattr(made_sessions, "VALIDATION", 2)
    return made_of


def test_words_that_come_back_in_a_book_weigh_most():
    names = {1: " Rosalind", 2: " a", 3: "ing", 4: " far"}

    class Names:
        def decode(self, tokens):
            return names.get(int(tokens[0]), " another")

    tokens = np.array([1, 2, 3, 4, *range(10, 20), 1, 2, 3, 4, 1, 30, 0, 0])
    row = {"tokens": tokens, "loss_weight": np.where(np.arange(21) < 19, 0.05, 0)}
    found = made_sessions._recurring(row, Names())
    heavy = np.flatnonzero(found == 0.95)
    assert heavy.tolist() == [13]  # Rosalind is its label; again at 17, too near.
    assert (found[:19] >= 0.3).all()
    assert not found[19:].any()


@pytest.mark.slow
def test_a_memory_trains_on_made_sessions_and_its_weights_are_those_of_a_run(tiny, tmp_path):
    own, arrays, out = tiny.own, tiny.arrays, tmp_path / "out"
    options = (
        *("--sessions", tiny.rows, "--base", tiny.base, "--weights", tiny.weights, "--out", out),
        *("--run", tmp_path / "run", "--batch", 2, "--rate", 0.01, "--address", 0.3),
        *("--steps", 2, "--seconds", 500, "--dtype", "float32", "--seed", 1),
    )
    run("lab.real_model.training", *options)
    found = load_file(out / "memory.safetensors")
    assert {*found} == {*own}
    moved = [name for name in own if not np.array_equal(found[name], arrays[name])]
    assert any("query_proj" in name for name in moved)
    assert f"memory/layer_{smollm2.LAYER}/keys" not in moved
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "dtype"), [("fwpkm", "bfloat16"), ("sdm", "float32")])
def test_a_memory_trains_further_peer_memory(tiny, tmp_path, monkeypatch, rule, dtype):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    further = importlib.import_module("lab.real_model.peer_memory")
    for name, value in (("LAYER", 1), ("RULE", smollm2.MEMORY.rule), ("VALIDATION", 2)):
        monkeypatch.setattr(further, name, value)
    monkeypatch.setattr("lab.real_model.peer_layer.RULE", smollm2.MEMORY.rule)
    out = tmp_path / "out"
    options = (
        *("--sessions", tiny.rows, "--base", tiny.base, "--weights", tiny.weights),
        *("--batch", 2, "--rate", 0.01, "--rule", rule, "--dtype", dtype, "--seed", 1),
        *("--states", tmp_path / "states"),
    )
    more = ("--minutes", 0.05, "--tests", tiny.rows, "--out", out)
    run("lab.real_model.further_training", *options, *more)
    first, *lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    if rule == "fwpkm":  # The library's output was compared.
        assert first["check"] < 1e-5
    assert lines[1]["step"] == 1
    assert [line["written"] for line in lines[-2:]] == [True, False]
    assert lines[-2]["test"] == tiny.rows.name
    found = load_file(out / "memory.safetensors")
    assert {*found} == {*tiny.own}
    assert not np.array_equal(
        found["params/blocks/1/memory/query_proj/kernel"],
        tiny.arrays["params/blocks/1/memory/query_proj/kernel"],
    )
    monkeypatch.delattr(further.Frozen, "below")  # All that it would compute was kept.
    run("lab.real_model.further_training", *options, "--minutes", 0, "--out", tmp_path / "again")
    _, again, _ = map(json.loads, (tmp_path / "again" / "log.jsonl").read_text().splitlines())
    assert again == lines[0]
