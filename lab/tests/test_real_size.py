"""The program behind docs/measurements/real_size.md, at its least size."""

import json
import lzma
import re
import threading
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import carried_verdicts
from benchmarks.compiled import executables
from fwpkm_jax.rules import FwPKM
from lab.study.real_size import evaluation, kernels, sizes, tables, text
from lab.study.real_size import executables as made_ahead
from lab.study.real_size.checkpoint import load_checkpoint, save_checkpoint
from lab.study.real_size.programs import first_state, frozen, planned_rate, training_step
from lab.study.real_size.sizes import SIZES
from lab.study.real_size.training import planned_steps
from lab.study.real_size.wordings import HELD_OUT, TRAINED
from pallas_kernels import dispatch, verdicts
from tests.benchmarks.programs import ran_alone, result_lines, run

TINY = SIZES["tiny"]


def books(number, characters, seed=0):
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("abcde "), characters)) for _ in range(number)]


def write_books(folder, train, valid):
    for name, texts in (("train_0", train), ("valid", valid)):
        lines = "\n".join(json.dumps({"text": one}) for one in texts)
        (folder / f"{name}.jsonl.xz").write_bytes(lzma.compress(lines.encode()))


def test_no_training_has_an_opening_or_a_link_of_the_wordings_held_out():
    assert len(set(TRAINED)) >= 64
    assert len(set(HELD_OUT)) == 20
    for part in ("opening", "link"):
        trained, held_out = ({getattr(w, part) for w in words} for words in (TRAINED, HELD_OUT))
        assert not trained & held_out
    lengths = [len(wording.link) for wording in TRAINED]
    assert min(lengths) < 5
    assert max(lengths) > 70
    assert all(w.sentence("12ab", "345678").startswith(w.question("12ab")) for w in HELD_OUT)


def test_answers_in_training_text_repeat_a_number_stated_before_under_their_key():
    plain = np.frombuffer(books(1, 60_000)[0].encode(), np.uint8)
    tokens, weights = text.with_needles(plain, TINY, np.random.default_rng(1))
    found, answered = tokens.tobytes().decode(), weights == text.ANSWER_WEIGHT
    starts = np.flatnonzero(answered & ~np.roll(answered, 1))
    assert len(starts) > 10
    assert answered.sum() == len(starts) * text.VALUE_DIGITS
    for start in starts:
        value = found[start : start + text.VALUE_DIGITS]
        assert value.isdigit()
        stated = found[:start].rfind(value)
        assert stated >= 0
        keys = [found[max(at - 130, 0) : at] for at in (stated, start)]
        keys = [set(re.findall(r"\b[0-9a-f]{4}\b", one)) for one in keys]
        assert keys[0] & keys[1]
    # Without the sentences it is the text.
    assert len(found) > len(plain)
    assert set(np.unique(weights)) == {1, text.ANSWER_WEIGHT}


def test_rows_of_a_place_continue_its_text():
    rows = text.TrainingText([book.encode() for book in books(3, 9000)], TINY, seed=0)
    first, second = rows.batch(0), rows.batch(1)
    assert first["tokens"].shape == (TINY.batch, TINY.length + 1)
    assert first["loss_weight"].shape == (TINY.batch, TINY.length)
    np.testing.assert_array_equal(first["tokens"][:, -1], second["tokens"][:, 0])
    np.testing.assert_array_equal(rows.batch(rows.steps)["tokens"], first["tokens"])


@pytest.mark.parametrize("other_question", [False, True])
def test_haystacks_state_what_their_questions_ask(other_question):
    unseen = [book.encode() for book in books(2, 6000)]
    found = text.haystacks(
        *(unseen, TINY, np.random.default_rng(0)),
        rows=3,
        needles=5,
        wordings=HELD_OUT,
        other_question=other_question,
    )
    assert found.tokens.shape == (TINY.batch, 3 * TINY.length + 1)
    assert found.asked.shape == (TINY.batch * 5, TINY.ask_length + 1)
    assert found.stated.sum() == TINY.batch * 5 * text.VALUE_DIGITS
    for index, asked in enumerate(found.asked):
        haystack = bytes(found.tokens[index // 5].tolist()).decode()
        question = bytes(asked.tolist()).decode()
        value = question[-text.VALUE_DIGITS :]
        assert haystack.count(f"{value}.") == 1
        keys = re.findall(r"[0-9a-f]{4}", question[-130 - text.VALUE_DIGITS : -text.VALUE_DIGITS])
        sentences = [f"{w.question(key).decode()}{value}" for w in HELD_OUT for key in keys]
        (asked_as,) = {one for one in sentences if question.endswith(one)}
        assert (asked_as in haystack) != other_question
    same_row = bytes(found.same_row[0].tolist()).decode()
    assert same_row.count(same_row[-text.VALUE_DIGITS :]) == 2


def test_sections_and_gates_are_means_of_their_bytes():
    nats = np.arange(12, dtype=np.float32).reshape(6, 2)
    assert evaluation.section_means(nats, (0, 2, 6, 8)) == [1.5, 7.5, None]
    counts = evaluation.trigram_counts([b"abcabcabc", b"xy1"])
    assert counts[(ord("a") << 16) + (ord("b") << 8) + ord("c")] == 3
    tokens = np.frombuffer(b"abcabc\n1 ", np.uint8).astype(np.int32)
    gates = np.arange(8, dtype=np.float32)[None]
    (found,) = evaluation.gates_by_kind(gates, tokens, counts)
    by_kind = dict(zip(evaluation.kinds(), found, strict=True))
    assert by_kind["below 1"] == 6.5  # "bc\n" and "c\n1"
    assert by_kind["below 10"] == 3.5
    assert by_kind["below 100"] is None
    assert (by_kind["letters"], by_kind["digits"], by_kind["others"]) == (3.5, 7.0, 6.0)


def test_books_of_unlike_length_are_read_to_their_last_whole_row():
    unseen = [bytes([number + 1]) * length for number, length in enumerate((1800, 900, 100, 6000))]
    batches = list(evaluation.book_batches(unseen, TINY, rows=4))
    assert [lengths for _, lengths in batches] == [[4, 2], [1]]
    assert [tokens.shape for tokens, _ in batches] == [(2, 4 * 768 + 1), (2, 769)]
    assert batches[0][0][0, 0] == 4
    assert batches[1][0][0, 0] == 2


def test_the_rate_warms_up_and_falls_to_a_tenth_over_the_planned_steps():
    optimizer = planned_rate(1.0)
    start: Any = optimizer.init({})
    state = start._replace(steps=jnp.asarray(1000))
    rates = []
    update = jax.jit(optimizer.update)
    for _ in range(1001):
        scaled, state = update(jnp.ones(()), state)
        rates.append(-float(scaled))
    assert rates[0] == pytest.approx(1 / 101)
    assert max(rates) == rates[100] == pytest.approx(1.0)
    assert rates[550] == pytest.approx(0.55)
    assert rates[1000] == pytest.approx(0.1)


def test_steps_are_those_that_fit_in_whole_turns():
    seconds = {"a": 0.01, "b": 0.03}
    assert planned_steps(seconds, available=100, most=10_000, turn=25) == 2375
    assert planned_steps(seconds, available=100, most=60, turn=25) == 50
    assert planned_steps(seconds, available=-5, most=60, turn=25) == 25


def test_a_checkpoint_of_eight_bits_comes_back_within_its_step(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    params = {"a": rng.normal(size=(64, 32)).astype(np.float32), "b": np.ones(7, np.float32)}
    monkeypatch.setattr("lab.study.real_size.checkpoint.LARGEST", 1000)
    assert save_checkpoint(params, tmp_path, "one", most_files=1) == []
    files = save_checkpoint(params, tmp_path, "one", most_files=9)
    assert len(files) > 1
    back = load_checkpoint(params, tmp_path, "one")
    step = np.abs(params["a"]).max(axis=1, keepdims=True) / 127
    assert np.all(np.abs(back["a"] - params["a"]) <= 0.51 * step)
    np.testing.assert_array_equal(back["b"], params["b"])
    with pytest.raises(FileNotFoundError, match=r"two_0\.bin"):
        load_checkpoint(params, tmp_path, "two")
    with pytest.raises(ValueError, match="hold no c; the model is another one"):
        load_checkpoint({"c": params["b"]}, tmp_path, "one")
    with pytest.raises(ValueError, match=r"b has shape \(7,\), the model \(8,\)"):
        load_checkpoint({"b": np.ones(8)}, tmp_path, "one")


def test_a_frozen_model_differs_in_the_size_of_its_writes_alone():
    model = sizes.model_of("fwpkm", "real")
    still = frozen(model)
    assert still.fast_weight.rule == replace(FwPKM(num_subkeys=256), learning_rate=0.0)
    assert frozen(sizes.model_of("backbone", "real")) == sizes.model_of("backbone", "real")
    assert (still.mixers, still.memory_layers) == (model.mixers, model.memory_layers)


def test_the_table_pairs_books_and_has_a_column_for_each_run():
    def run_of(seed, gain):
        about = {"part": "about", "size": "real", "device": "H100", "seed": seed}
        losses = [1.0, 2.0, 4.0]
        lines = [about]
        for variant, way, less in (("backbone", "rows", 0), ("fwpkm", "written", gain)):
            nats = [[loss, loss - less, None if loss == 4 else loss - less] for loss in losses]
            lines.append({"part": "text", "variant": variant, "way": way, "nats": nats})
        return lines

    found = tables.table(run_of(0, 0.5) + run_of(1, 0.25))
    assert "| real, H100, seed 0 | real, H100, seed 1 |" in found
    row = next(line for line in found.splitlines() if "minus backbone, from row nine" in line)
    assert row.endswith("| -0.5000 [-0.5000, -0.5000] | -0.2500 [-0.2500, -0.2500] |")
    assert "needles" not in found
    assert "first digit" not in found


def test_kernels_are_checked_side_by_side_and_verdicts_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    together = threading.Barrier(len(kernels.CHECKS), timeout=20)

    def run_apart(check, kernel, device_kind):
        together.wait()  # Only passes when all run at once.
        assert (kernel, device_kind) == ("gpu", "a GPU")
        return verdicts.Verdict("differs" if check == kernels.CHECKS["slot_read"] else None)

    expected = {op: "differs" if op == "slot_read" else None for op in kernels.CHECKS}
    assert kernels.check_side_by_side("a GPU", run_apart) == expected
    # The barrier would break now.
    assert kernels.check_side_by_side("a GPU", run_apart) == expected
    carried_verdicts.give(tmp_path / "verdicts.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert kernels.prepare(tmp_path / "verdicts.json")["taken"] == len(expected)
    assert kernels.check_side_by_side("a GPU", run_apart) == expected


@pytest.mark.slow
def test_every_operation_of_a_step_has_a_kernel_on_a_gpu_and_a_check_among_those_made_ahead():
    model, size = sizes.model_of("both", "real"), SIZES["real"]
    batch = {
        "tokens": jax.ShapeDtypeStruct((size.batch, size.length + 1), jnp.int32),
        "loss_weight": jax.ShapeDtypeStruct((size.batch, size.length), jnp.float32),
    }
    with dispatch.compile_kernels("gpu"):
        dispatch.decisions.clear()
        training_step(model, size).trace(jax.eval_shape(first_state(model, size), 0), batch)
        found = {(op, chosen) for op, chosen, _ in dispatch.decisions}
    assert found == {(op, "gpu") for op in kernels.CHECKS}


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no train\*.jsonl.xz; --prepare"):
        text.read_books(tmp_path)
    with pytest.raises(SystemExit, match=r"--variants: \['lact'\] are none of"):
        run(
            "lab.study.real_size.__main__",
            "--data",
            tmp_path,
            "--out",
            tmp_path,
            "--variants",
            "lact",
        )


def test_a_sitting_packs_books_trains_in_turns_and_evaluates(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    carried, cache = tmp_path / "verdicts.json", tmp_path / "compiled"
    carried_verdicts.give(carried)
    kept = jax.config.values["jax_compilation_cache_dir"]
    write_books(tmp_path, books(6, 12_000), books(3, 8000, seed=1))
    packed, out = tmp_path / "packed", tmp_path / "out"
    limits = ("--prepare", "--train-bytes", 60_000, "--valid-bytes", 7000)
    folders = ("--data", tmp_path, "--out", packed)
    assert run("lab.study.real_size.__main__", *folders, *limits) == 0
    chosen = text.read_books(packed)
    assert len(chosen.train) == 5
    assert {len(book) for book in chosen.valid} == {7000}
    options = ("--data", packed, "--out", out, "--size", "tiny", "--steps", 4, "--seconds", 900)
    ends = ("--evaluation-seconds", 400)
    others = ("--batches", 1, "--readings", 2, "--book-rows", 3, "--books", 3, "--seed", 0)
    files = ("--checkpoint-files", 2, "--verdicts", carried, "--cache", cache)
    try:
        assert run("lab.study.real_size.__main__", *options, *others, *files, *ends) == 0
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)
    lines = result_lines(out / "lines.jsonl")
    parts = [line["part"] for line in lines]
    assert parts[0] == "about"
    assert parts[-1] == "end"
    assert "failed" not in parts
    turns = [(x["variant"], x["step"]) for x in lines if x["part"] == "train"]
    assert turns == [("backbone", 2), ("fwpkm", 2), ("backbone", 4), ("fwpkm", 4)]
    ways = [(x["variant"], x["way"]) for x in lines if x["part"] == "text"]
    assert ways == [
        *(("backbone", "rows"), ("backbone", "carried"), ("fwpkm", "written")),
        *(("fwpkm", "frozen"), ("fwpkm", "no reads")),
    ]
    needles = [x for x in lines if x["part"] == "needles"]
    assert {(x["variant"], x["way"], x["reading"]) for x in needles} == {
        *(("backbone", "rows", 0), ("backbone", "rows", 1)),
        *(("fwpkm", way, reading) for way in ("written", "frozen") for reading in (0, 1)),
        *(("fwpkm", "written", 2), ("backbone", "carried", 1)),
    }
    assert {x["bytes"] for x in needles} == {768, 1536}
    checkpoint = next(x for x in lines if x["part"] == "checkpoint")
    assert list(checkpoint["files"]) == ["fwpkm_0.bin"]
    assert abs(checkpoint["nats_more"]) < 0.01
    assert "first digit, one row, FwPKM" in tables.table(lines)


def test_programs_made_ahead_are_loaded_and_those_that_do_not_load_are_compiled(tmp_path, request):
    if ran_alone(request):
        return
    write_books(tmp_path, books(6, 12_000), books(3, 8000, seed=1))
    made, out = tmp_path / "made", tmp_path / "out"
    size = ("--size", "tiny", "--variants", "backbone")
    made_for = ("--compile-for", "cpu", "--out", made)
    assert run("lab.study.real_size.__main__", *made_for, *size) == 0
    names = ("ask", "ask_carried", "carry", "init", "read", "step", "stream")
    assert sorted(file.name for file in made.glob("*.xz")) == [
        f"backbone.{name}.exe.xz" for name in names
    ]
    (made / "backbone.stream.exe.xz").write_bytes(b"")
    step, facts = executables.load(made / "backbone.step.exe.xz")
    assert facts["source"] == made_ahead.source()
    executables.write(made / "backbone.step.exe.xz", step, source="of an earlier code")
    options = ("--data", tmp_path, "--out", out, "--executables", made, "--steps", 2, *size)
    few = ("--batches", 1, "--readings", 1, "--book-rows", 1, "--checkpoint-files", 0)
    limits = ("--seconds", 900, "--evaluation-seconds", 400)
    assert run("lab.study.real_size.__main__", *options, *few, *limits) == 0
    lines = result_lines(out / "lines.jsonl")
    (loaded,) = (line for line in lines if line["part"] == "loaded")
    assert loaded["programs"] == [
        f"backbone.{name}" for name in names if name not in ("step", "stream")
    ]
    assert loaded["failed"].keys() == {"backbone.step.exe.xz", "backbone.stream.exe.xz"}
    assert loaded["failed"]["backbone.step.exe.xz"].startswith("made of source of an earlier code")
    assert "Error: " in loaded["failed"]["backbone.stream.exe.xz"]
    assert lines[-1]["part"] == "end"
    assert {"text", "needles"} <= {line["part"] for line in lines}
