import json
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from fwpkm_jax.data import TextData, TokenFile, load_tokenizer, make_dataset
from fwpkm_jax.data.prepare.command import main
from fwpkm_jax.paper.data.pile import Pile

BYTES = ("--tokenizer", "bytes")


def entries(path, vocab_size=257):
    file = TokenFile(path, vocab_size=vocab_size)
    return [file.entry(index) for index in range(file.num_entries)]


def texts(path):
    return [load_tokenizer("bytes").decode(entry) for entry in entries(path)]


@pytest.fixture
def books(tmp_path):
    path = tmp_path / "books.jsonl"
    records = [{"id": n, "text": chr(97 + n) * 2000, "body": str(n)} for n in range(9)]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_any_json_lines_become_rows_for_training(books, tmp_path, capsys):
    out = tmp_path / "out" / "books.bin"
    assert main(["text", "--input", str(books), "--out", str(out), *BYTES]) == 0
    assert [len(row) for row in entries(out)] == [4097] * 4
    assert "4 entries, 16,388 tokens" in capsys.readouterr().out
    data = TextData(train_paths=(str(out),), length=512)
    batch = next(iter(make_dataset(data, split="train", batch_size=4, seed=0)))
    assert batch["tokens"].shape == (4, 513)


def test_options_reach_the_job(books, tmp_path):
    out = tmp_path / "x.bin"
    options = {
        "--layout": "stream",
        "--field": "body",
        "--skip_documents": "2",
        "--max_documents": "5",
        "--max_tokens": "7",
        "--num_threads": "1",
        "--save_seconds": "0",
    }
    flat = [word for option in options.items() for word in option]
    assert main(["text", "--input", str(books), "--out", str(out), *BYTES, *flat]) == 0
    assert texts(out) == ["2", "3", "4", "5"]
    assert main(["text", "--input", str(books), "--out", str(out), *BYTES, *flat]) == 0


def test_the_papers_tokenizer_is_the_default(books, tmp_path):
    out = tmp_path / "x.bin"
    assert main(["text", "--input", str(books), "--out", str(out), "--layout", "stream"]) == 0
    mistral = load_tokenizer("mistral-v1")
    first = entries(out, vocab_size=32_000)[0]
    np.testing.assert_array_equal(first, [*mistral.encode("a" * 2000), mistral.eos_id])
    manifest = json.loads(out.with_suffix(".json").read_text())
    assert manifest["job"]["tokenizer_fingerprint"] == mistral.fingerprint


def test_every_parquet_source_has_its_command(tmp_path):
    names = ["FreeLaw", "Ubuntu IRC"]
    table = {"text": ["l", "i", "m"], "meta": [{"pile_set_name": n} for n in (*names, names[0])]}
    folder = tmp_path / "pile"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table(table), folder / "000_00000.parquet")
    arguments = ["--input", str(folder), *BYTES, "--layout", "stream"]
    out = tmp_path / "domains"
    pile = ["pile", *arguments, "--out", str(out), "--domains", *names, "--max_characters", "1"]
    assert main(pile) == 0
    assert (texts(out / "freelaw.bin"), texts(out / "ubuntu_irc.bin")) == (["l"], ["i"])
    out = tmp_path / "some.bin"
    range_of = ["--skip_documents", "-2", "--max_documents", "1"]
    assert main(["text", *arguments, "--out", str(out), *range_of]) == 0
    assert texts(out) == ["i"]


def test_several_files_go_into_a_folder(tmp_path, capsys):
    arguments = ["--input", str(tmp_path), "--out", str(tmp_path / "x.bin"), *BYTES]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["a"], "meta": [{"pile_set_name": "FreeLaw"}]}),
        tmp_path / "a.parquet",
    )
    assert main(["pile", *arguments]) == 2
    assert "x.bin is to be a folder" in capsys.readouterr().err


def test_a_source_that_ends_before_its_limit_is_no_secret(books, tmp_path, capsys):
    for tokens, message in ((16_388, "tokens\n"), (16_389, "ended before max_tokens=16,389\n")):
        out = tmp_path / f"{tokens}.bin"
        arguments = ["--input", str(books), "--out", str(out), "--max_tokens", str(tokens)]
        assert main(["text", *arguments, *BYTES]) == 0
        assert capsys.readouterr().out.endswith(message)


def test_the_pile_is_capped_as_in_the_paper():
    defaults = Pile(input="", out=None)
    assert (defaults.max_characters, defaults.max_tokens) == (80_000_000, 8_192_000)
    assert (defaults.layout, len(defaults.domains)) == ("l4096", 6)


def test_longcrawl64_has_its_command(tmp_path, vocabulary):
    array, out = tmp_path / "val.zarr", tmp_path / "out.bin"
    array.mkdir()
    metadata = {"zarr_format": 2, "dtype": "<u2", "order": "C", "shape": [2, 3], "chunks": [1, 3]}
    metadata |= {"compressor": None, "fill_value": 0, "filters": None}
    (array / ".zarray").write_text(json.dumps(metadata))
    for row, tokens in enumerate(([32, 33, 50_256], [34, 50_256, 35])):
        (array / f"{row}.0").write_bytes(np.asarray(tokens, "<u2").tobytes())
    arguments = ["longcrawl64", "--input", str(array), "--out", str(out), *BYTES]
    arguments += ["--layout", "stream", "--vocabulary", vocabulary, "--skip_documents", "1"]
    assert main([*arguments, "--missing_chunks", "skip"]) == 0
    assert texts(out) == ["C", "D"]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("text", [], "There is no file or folder"),
        ("pile", [], "huggingface.co/datasets/monology/pile-uncopyrighted-parquet"),
        ("longcrawl64", ["--vocabulary", "VOCABULARY"], "datasets/clankur/longcrawl64"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    tmp_path, capsys, source, options, message, vocabulary
):
    options = [vocabulary if option == "VOCABULARY" else option for option in options]
    arguments = ["--input", str(tmp_path / "nothing"), "--out", str(tmp_path / "x.bin")]
    assert main([source, *arguments, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("x*"))


@pytest.mark.thorough
def test_half_of_a_mixture_comes_from_each_budget(tmp_path):
    """The paper's 5B + 5B: two files capped alike, mixed one to one, each row once an epoch."""
    for name, letter, documents in (("web", "w", 3_000), ("long", "l", 900)):
        size = 1_000 if name == "web" else 5_000
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for number in range(documents):
                text = f"{letter}{number:05} " * (size // 7)
                file.write(json.dumps({"text": text}) + "\n")
        arguments = ["--input", str(tmp_path / f"{name}.jsonl"), *BYTES]
        budget = ["--max_tokens", str(512 * 4097)]
        assert main(["text", *arguments, *budget, "--out", str(tmp_path / f"{name}.bin")]) == 0
    data = TextData(
        train_paths=(str(tmp_path / "web.bin"), str(tmp_path / "long.bin")), train_weights=(1, 1)
    )
    batches = iter(make_dataset(data, split="train", batch_size=128, seed=0))
    rows = [row.tobytes() for _ in range(8) for row in next(batches)["tokens"]]
    stored = [
        entry.astype(np.int32).tobytes()
        for name in ("web", "long")
        for entry in entries(tmp_path / f"{name}.bin")
    ]
    assert len(stored) == 2 * 512
    assert sorted(rows) == sorted(stored)


@pytest.mark.slow  # Starts the program a dozen times.
def test_killed_at_random_moments_it_ends_with_the_same_files(tmp_path):
    with (tmp_path / "x.jsonl").open("w") as file:
        for number in range(4_000):
            file.write(json.dumps({"text": f"{number} and so on. " * 400}) + "\n")
    options = [*BYTES, "--save_seconds", "0"]

    def start(out):
        arguments = ["text", "--input", str(tmp_path / "x.jsonl"), "--out", str(out), *options]
        return subprocess.Popen([sys.executable, "-m", "fwpkm_jax.data.prepare", *arguments])

    whole, out = tmp_path / "whole" / "x.bin", tmp_path / "x.bin"
    assert start(whole).wait() == 0
    generator, kills, state = random.Random(0), 0, out.with_suffix(".partial.json")

    def saved():
        return state.stat().st_mtime_ns if state.exists() else 0

    for _ in range(6):
        before, process = saved(), start(out)
        while process.poll() is None and saved() == before:
            time.sleep(0.002)
        time.sleep(generator.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert start(out).wait() == 0
    assert kills >= 3
    for suffix in (".bin", ".idx", ".json"):
        assert out.with_suffix(suffix).read_bytes() == whole.with_suffix(suffix).read_bytes()
    assert not list(tmp_path.glob("*partial*"))
