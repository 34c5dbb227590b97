"""`fwpkm memories`: what it lists, describes, deletes and refuses."""

import json

import jax
import numpy as np
import pytest

from fwpkm_jax import memories
from fwpkm_jax.cli import main
from fwpkm_jax.io.safetensors import write_tensors
from fwpkm_jax.memories import file
from tests.memories.models import ONE, make_model, make_state


@pytest.fixture
def program(text_run, tmp_path, capsys):
    """Runs the command on the directory of a run; returns exit code and output."""
    (tmp_path / "config.json").write_text(json.dumps(text_run.experiment.to_json()))

    def run(*arguments):
        code = main(["memories", str(tmp_path), *arguments])
        shown = capsys.readouterr()
        return code, shown.err if code else shown.out

    return run


def test_memories_are_listed_described_and_deleted(program, tmp_path):
    folder, model = tmp_path / "memories", make_model(ONE)
    assert program() == (0, f"There are no memories in {folder}.\n")
    memories.save(folder, "start-0", make_state(model, seed=1), model=model, keep="memory")
    memories.fork(folder, "start-0", "alice")
    state = make_state(model, seed=2)
    memories.save(folder, "alice", state, model=model, origin="runs/a, step 0")
    memories.fork(folder, "alice", "alice@day")
    (folder / "other.safetensors").write_text("mine")

    code, shown = program()
    assert code == 0
    header, _, *rows, damaged, last = shown.splitlines()
    assert header.split("  ")[0] == "name"
    found = {row.split()[0]: row.split() for row in rows}
    assert found.keys() == {"alice", "alice@day", "start-0"}
    about = memories.describe(folder, "alice")
    read = [f"{count:,}" for count in about.num_read]
    assert found["alice"][1:] == [about.saved, *read, "all", f"{about.num_bytes:,}", "start-0"]
    assert found["start-0"][-3] == "memory"
    assert found["start-0"][-1] == "-"
    assert damaged.startswith(f"{folder / 'other.safetensors'} is damaged, or no safetensors file")
    # The link that the fork needs is no second copy.
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert last == f"4 in {folder}, {sum(sizes):,} bytes with what forks share."

    assert found["alice@day"][-3:] == ["point", "of", "alice"]

    code, shown = program("--show", "alice")
    assert code == 0
    assert shown.startswith(f"alice: {' '.join(read)} tokens read, saved {about.saved} (caches, ")
    own, total = about.rows["stream/memory/layer_0/values"]
    rows = f"layer_0/values: {own:,} of {total:,} rows in its own file ({own / total:.2%})."
    lines = ["Of runs/a, step 0.", "Forked from start-0.", "Forks: alice@day.", rows]
    assert set(lines) <= set(shown.splitlines())

    code, shown = program("--delete", "alice")
    assert (code, len(shown.splitlines())) == (2, 1)
    assert "'alice' is the base of alice@day" in shown
    for name in ("alice@day", "alice", "other", "start-0"):
        assert program("--delete", name) == (0, f"Deleted {name!r}.\n")
    assert memories.names(folder) == ()
    assert not list(folder.rglob("*.safetensors"))


def test_memories_are_forked_and_go_back_to_points(program, tmp_path):
    folder, model = tmp_path / "memories", make_model(ONE)
    first, second = (make_state(model, seed=seed) for seed in (1, 2))
    memories.save(folder, "alice", first, model=model)
    assert program("--fork", "alice", "bob") == (0, "Forked 'alice' as 'bob'.\n")
    assert program("--fork", "alice", "alice@monday")[0] == 0
    memories.save(folder, "alice", second, model=model)
    assert program("--restore", "alice", "alice@monday") == (
        0,
        "Made 'alice' again what 'alice@monday' is.\n",
    )
    for name in ("alice", "bob"):
        again = memories.load(folder, name, model)
        jax.tree.map(np.testing.assert_array_equal, again.stream.memory, first.stream.memory)
    rows = {row.split()[0]: " ".join(row.split()) for row in program()[1].splitlines()}
    assert rows["alice"].endswith(" its point alice@monday")
    assert rows["alice@monday"].endswith(" point of alice")


def test_what_the_command_cannot_do_is_one_line(program, tmp_path):
    for arguments, message in (
        (
            ("--show", "alice"),
            f"There is no memory 'alice' in {tmp_path / 'memories'}, which holds none.",
        ),
        (("--fork", "alice", "bob"), "There is no memory 'alice' in "),
        (("--show", "a", "--restore", "a", "b"), "show='a' and restore=('a', 'b') are two command"),
        (("--delete", "../x"), "name='../x' must be 1 to 100 ASCII letters"),
    ):
        code, shown = program(*arguments)
        assert (code, len(shown.splitlines())) == (2, 1)
        assert message in shown
    assert main(["memories", str(tmp_path / "nowhere")]) == 2


def write_facts(path, text, checksum="0" * 64):
    """A memory's file without arrays whose header holds this text as its facts."""
    metadata = {"format": file.FORMAT, "checksum": checksum, "facts": text}
    with path.open("wb") as content:
        write_tensors(content, {}, metadata=metadata)


def facts_of(folder, name):
    return file.read_facts(folder / f"{name}.safetensors")[0]


def test_a_damaged_memory_is_one_line_and_the_others_are_listed(program, tmp_path):
    folder, model = tmp_path / "memories", make_model(ONE)
    memories.save(folder, "alice", make_state(model), model=model)
    whole = (folder / "alice.safetensors").read_bytes()
    facts = facts_of(folder, "alice")
    wrong = {
        "without": {name: x for name, x in facts.items() if name != "saved"},
        "number": facts | {"saved": 3},
        "counts": facts | {"num_read": [1.5]},
        "rows": facts | {"rows": {"a": [1]}},
        "base": facts | {"base": {"name": "b", "checksum": "../../../etc/passwd"}},
        "keep": facts | {"keep": "\x1b[2J"},
        "list": [],
    }
    for name, value in wrong.items():
        write_facts(folder / f"{name}.safetensors", json.dumps(value))
    write_facts(folder / "deep.safetensors", "[" * 100_000)
    write_facts(folder / "sum.safetensors", json.dumps(facts), checksum="x")
    (folder / "cut.safetensors").write_bytes(whole[:40])
    (folder / "empty.safetensors").touch()
    (folder / "folder.safetensors").mkdir()
    (folder / "nowhere.safetensors").symlink_to(folder / "gone")
    rng = np.random.default_rng(0)
    header = int.from_bytes(whole[:8], "little")
    for number in range(100):
        at = int(rng.integers(8 + header))
        changed = whole[:at] + bytes([rng.integers(256)]) + whole[at + 1 :]
        (folder / f"random{number}.safetensors").write_bytes(changed)
    code, shown = program()
    assert code == 0
    assert shown.isprintable() or set(filter(lambda x: not x.isprintable(), shown)) == {"\n"}
    lines = shown.splitlines()
    assert any(line.startswith("alice ") for line in lines)
    for name in (*wrong, "deep", "sum", "cut", "empty"):
        (line,) = [line for line in lines if f"{name}.safetensors" in line]
        assert line.endswith("; delete it, or put back a copy.")
    for name in ("without", "deep"):
        code, shown = program("--show", name)
        assert (code, shown.count("\n")) == (2, 1)


def test_what_a_file_says_is_shown_and_not_obeyed(program, tmp_path):
    folder, model = tmp_path / "memories", make_model(ONE)
    evil = "\x1b]0;owned\x07\x1b[2J\nfwpkm: all is well\u202e"
    memories.save(folder, "alice", make_state(model), model=model, origin=evil)
    facts = facts_of(folder, "alice") | {"saved": "\x1b[8m2026"}
    write_facts(folder / "bob.safetensors", json.dumps(facts))
    shown = program()[1] + program("--show", "alice")[1] + program("--show", "bob")[1]
    assert r"Of \x1b]0;owned\x07\x1b[2J fwpkm: all is well\u202e." in shown
    assert r"\x1b[8m2026" in shown
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)
    other = make_model(ONE, seed=5)
    with pytest.raises(ValueError, match=r"other weights, of \\x1b\]0;owned.*well") as error:
        memories.load(folder, "alice", other)
    assert str(error.value).isprintable()


def test_of_many_names_the_nearest_are_given(program, tmp_path):
    folder = tmp_path / "memories"
    folder.mkdir()
    for number in range(3000):
        (folder / f"user{number}.safetensors").touch()
    code, shown = program("--show", "user77x")
    assert code == 2
    assert "There is no memory 'user77x'" in shown
    assert "user77" in shown
    assert "2,994 others" in shown
    assert len(shown) < 500
