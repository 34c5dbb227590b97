"""Conversations whose memory lies in a bucket, and what is refused before a model is loaded."""

import io
import json

import pytest

from fwpkm_jax import memories
from fwpkm_jax.cli import conversation_options, main
from fwpkm_jax.storage import lock
from fwpkm_jax.storage.lock import Lock
from fwpkm_jax.storage.stores import Store
from tests.training.runs.stores import KINDS, a_store

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


@pytest.fixture
def program(text_run, monkeypatch, capsys):
    """Runs a command on an untrained run on text; returns exit code, output and errors."""

    def run(command, run_dir, *arguments, lines="", load=lambda *_, **__: text_run):
        monkeypatch.setattr(conversation_options, "load_run", load)
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        capsys.readouterr()  # What a store's server printed when it started.
        code = main([command, str(run_dir), *arguments])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def own(errors: str) -> list[str]:
    """The command's lines; a store's server writes others."""
    return [line for line in errors.splitlines() if line.startswith("fwpkm ")]


@pytest.mark.thorough("memory")
@pytest.mark.parametrize("kind", KINDS)
def test_a_memory_in_a_bucket_lasts_from_command_to_command(program, kind, monkeypatch):
    short = ("--max_new_tokens=4", "--prompt=hello ")
    with a_store(kind, monkeypatch) as address:
        folder = f"{address}/of/users"
        code, first, errors = program("generate", "somewhere", f"--memory={folder}/ana", *short)
        assert (code, own(errors), first[:6]) == (0, [], "hello ")
        assert memories.names(folder) == ("ana", "start-0")
        code, shown, errors = program(
            *("chat", "somewhere", "--memory=ana", f"--memories={folder}"),
            *("--max_new_tokens=4",),
            lines="/save day\nhello\n/memory\n/forget day\n",
        )
        assert (code, own(errors)) == (0, [])
        assert shown.startswith("ana: 10 tokens read.")
        assert "Points to go back to: day." in shown
        assert shown.endswith("Back at 10 tokens read.\nThe memory 'ana' is saved.\n")
        about = memories.describe(folder, "ana")
        assert about.num_read == (10,)
        assert about.origin == "somewhere, step 0"
        assert not [name for name in Store(folder).sizes() if name.endswith("lock")]


def test_a_run_in_a_bucket_keeps_its_memories_there(program, text_run, monkeypatch):
    with a_store("memory", monkeypatch) as address:
        config = json.dumps(text_run.experiment.to_json()).encode()
        Store(address).write("config.json", config)
        folder = f"{address}/memories"
        listed = program("memories", address)
        assert listed == (0, f"There are no memories in {folder}.\n", "")
        code, _, errors = program(
            "generate", address, "--memory=ana", "--max_new_tokens=1", "--prompt=a"
        )
        assert (code, errors) == (0, "")
        code, shown, _ = program("memories", address)
        size = sum(size for name, size in Store(folder).sizes().items())
        last = f"2 in {folder}, {size:,} bytes with what forks share."
        assert (code, shown.splitlines()[-1]) == (0, last)
        code, shown, _ = program("memories", address, "--show=ana")
        assert f"\nOf {address}, step 0.\nForked from start-0.\n" in shown
        assert program("memories", address, "--delete=ana")[:2] == (0, "Deleted 'ana'.\n")
        assert memories.names(folder) == ("start-0",)
        code, _, errors = program("memories", address, "--show=anna")
        assert code == 2
        assert f"There is no memory 'anna' in {folder}; there are start-0." in errors
        none = f"{address}/none/config.json does not exist; {address}/none holds no run.\n"
        assert program("memories", f"{address}/none") == (2, "", f"fwpkm memories: {none}")


def never(*_, **__):
    raise AssertionError("A model was loaded.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--memory=ftp://b/m/ana"],
            "memory='ftp://b/m/ana' is an address of a kind",
        ),
        (["--memory=a", "--memories=ftp://b/m"], "'ftp://b/m' is an address of a kind that is not"),
        (["--memory=memory://b/m/a", "--memories=x"], "names a folder, and so does memories='x'"),
        (["--memory=memory://b/m/"], "name='' must be 1 to 100 ASCII letters"),
        (
            ["--memory=memory://ana"],
            "memory='memory://ana' names no folder; write memory://ana/NAME.",
        ),
        (["--memories=memory://b/m"], "memories='memory://b/m' has no effect without --memory"),
    ],
)
def test_an_address_that_cannot_work_is_refused_before_a_model_is_loaded(
    program, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    code, _, errors = program("generate", "somewhere", *arguments, load=never)
    assert (code, errors.count("\n")) == (2, 1)
    assert message in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
@pytest.mark.extras
def test_a_bucket_that_does_not_exist_is_refused_before_a_model_is_loaded(program, monkeypatch):
    with a_store("s3", monkeypatch):
        place = "s3://other-bucket/memories"
        code, _, errors = program("chat", "somewhere", f"--memory={place}/ana", load=never)
        (error,) = own(errors)
        assert code == 2
        assert f"There is no {place}/ana.lock; check the address." in error


def test_a_memory_in_use_is_refused_before_a_model_is_loaded(program, monkeypatch):
    monkeypatch.setattr(lock, "SILENCE", 2.0)
    monkeypatch.setattr(lock, "BEAT", 0.05)
    with a_store("memory", monkeypatch) as address:
        held = Lock(Store(address), name="ana.lock")
        code, _, errors = program("chat", "x", f"--memory={address}/ana", load=never)
        held.release()
    assert code == 2
    assert f"The memory 'ana' in {address} is in use by process" in errors.splitlines()[-1]
