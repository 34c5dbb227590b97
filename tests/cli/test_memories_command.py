"""`fwpkm memories`: what it lists, describes, deletes and refuses."""

import json

import pytest

from fwpkm_jax import memories
from fwpkm_jax.cli import memories_command
from tests.memories.models import ONE, make_model, make_state


@pytest.fixture
def program(text_run, tmp_path, capsys):
    """Runs the command on the directory of a run; returns exit code and output."""
    (tmp_path / "config.json").write_text(json.dumps(text_run.experiment.to_json()))

    def run(*arguments):
        code = memories_command.main([str(tmp_path), *arguments])
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
    assert damaged.startswith(f"{folder / 'other.safetensors'} is damaged, or no memory")
    # The link that the fork needs is no second copy.
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert last == f"4 in {folder}, {sum(sizes):,} bytes with what forks share."

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


def test_what_the_command_cannot_do_is_one_line(program, tmp_path):
    for arguments, message in (
        (("--show", "alice"), f"There is no memory 'alice' in {tmp_path / 'memories'}, but no mem"),
        (("--delete", "../x"), "name='../x' must be 1 to 100 ASCII letters"),
        (("--shwo", "alice"), "the nearest name is --show"),
    ):
        code, shown = program(*arguments)
        assert (code, len(shown.splitlines())) == (2, 1)
        assert message in shown
    assert memories_command.main([str(tmp_path / "nowhere")]) == 2
