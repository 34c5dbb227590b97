"""A stranger's run folder with links in the place of what a run writes; files of the user's beside.

Nothing outside the folder changes, and nothing that the run did not make is deleted.
"""

import dataclasses
import io
import shutil
from pathlib import Path

import pytest

from fwpkm_jax import cli, memories
from fwpkm_jax.data.prepare import prepare, text_files
from fwpkm_jax.evaluation.report import write_report
from fwpkm_jax.interchange import export_run
from fwpkm_jax.run.train import train
from fwpkm_jax.storage.lock import Lock
from tests.memories.models import ONE, make_model, make_state

PRECIOUS = "what the user cannot lose\n"


@pytest.fixture
def outside(tmp_path):
    """A folder of the user's: a file, and folders that look like old checkpoints."""
    folder = tmp_path / "outside"
    for number in (1, 2, 3, 100):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "thesis").write_text(PRECIOUS)
    (folder / "file").write_text(PRECIOUS)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {str(x.relative_to(folder)): x.read_text() for x in folder.rglob("*") if x.is_file()}


@pytest.fixture
def unchanged(outside):
    before = contents(outside)
    yield outside
    assert contents(outside) == before


@pytest.fixture
def received(unbroken, tmp_path):
    """A copy of a finished run, which trains one more step when it is resumed."""
    run = tmp_path / "run"
    shutil.copytree(unbroken.directory, run)
    training = dataclasses.replace(unbroken.experiment.training, steps=21)
    return dataclasses.replace(unbroken.experiment, run_dir=str(run), training=training)


@pytest.mark.slow
@pytest.mark.slow_cases("lock")
@pytest.mark.parametrize(
    "name", ["lock", "metrics.jsonl", "checkpoints", "checkpoints/7", "tensorboard", "profile"]
)
def test_training_writes_through_no_link_of_a_received_run(fault, unchanged, received, name):
    run = Path(received.run_dir)
    path = run / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(unchanged / ("file" if name in ("lock", "metrics.jsonl") else "."))
    if name == "profile":
        received = dataclasses.replace(
            received,
            profile=1,
            training=dataclasses.replace(received.training, steps=26),
        )
    with fault("a link in a received run, met while it trains"):
        with pytest.raises(ValueError, match=rf"{path} is a link"):
            train(received, stream=io.StringIO())
        assert path.is_symlink()


@pytest.mark.slow
def test_names_that_are_replaced_do_not_reach_what_links_lead_to(fault, unchanged, received):
    run = Path(received.run_dir)
    names = ["config.json", "environment.json", "results.json"]
    with fault("a link in a received run, met while it trains", len(names) + 3):
        (run / "results").mkdir(exist_ok=True)
        for name in names:
            (run / f"{name}.tmp").symlink_to(unchanged / "file")
        for name in ("environment.json", "results.json", "results/report.html"):
            (run / name).unlink(missing_ok=True)
            (run / f"{name}.tmp").unlink(missing_ok=True)
            (run / f"{name}.tmp").symlink_to(unchanged / "file")
        (run / "results.json").symlink_to(unchanged / "missing")
        (run / "results" / "report.html").symlink_to(unchanged / "file")
        train(received, stream=io.StringIO())
        write_report(run)
        assert not (run / "results.json").is_symlink()
        assert not (run / "results" / "report.html").is_symlink()


@pytest.mark.slow
def test_a_report_is_not_written_into_a_linked_folder(fault, unchanged, tmp_path, unbroken):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(unbroken.directory / "config.json", run)
    (run / "results").symlink_to(unchanged)
    with fault("a link in a received run, met by report or memories"):
        assert cli.main(["report", str(run)]) == 2


def test_locks_and_memories_write_through_no_link(fault, unchanged, tmp_path):
    model = make_model(ONE)
    state, folder = make_state(model), tmp_path / "memories"
    memories.save(folder, "alice", state, model=model)
    alice = folder / "alice.safetensors"
    with fault("a link in a received run, met by report or memories", 5):
        (folder / "alice.lock").symlink_to(unchanged / "file")
        with pytest.raises(ValueError, match=r"alice\.lock is a link"):
            memories.save(folder, "alice", state, model=model)
        (folder / "alice.lock").unlink()
        (folder / "bases").mkdir()
        (folder / "bases" / "lock").symlink_to(unchanged / "file")
        with pytest.raises(ValueError, match=r"lock is a link"):
            memories.fork(folder, "alice", "bob")
        shutil.rmtree(folder / "bases")
        (folder / "bases").symlink_to(unchanged)
        with pytest.raises(ValueError, match=r"bases is a link"):
            memories.fork(folder, "alice", "bob")
        (folder / "bases").unlink()
        alice.rename(tmp_path / "kept.safetensors")
        alice.symlink_to(tmp_path / "kept.safetensors")
        before = (tmp_path / "kept.safetensors").read_bytes()
        memories.save(folder, "alice", make_state(model, seed=3), model=model)
        assert not alice.is_symlink()
        assert (tmp_path / "kept.safetensors").read_bytes() == before
        # A file in `bases` that is no base stays when bases are tidied up.
        (folder / "bases").mkdir()
        (folder / "bases" / "mine.safetensors").write_text(PRECIOUS)
        memories.delete(folder, "alice")
        assert (folder / "bases" / "mine.safetensors").read_text() == PRECIOUS


@pytest.mark.slow
def test_memories_of_a_run_are_not_deleted_through_a_linked_folder(
    fault, unbroken, tmp_path, capsys
):
    run, model = tmp_path / "run", make_model(ONE)
    run.mkdir()
    shutil.copy(unbroken.directory / "config.json", run)
    memories.save(tmp_path / "others", "alice", make_state(model), model=model)
    (run / "memories").symlink_to(tmp_path / "others")
    with fault("a link in a received run, met by report or memories"):
        assert cli.main(["memories", str(run), "--delete", "alice"]) == 2
        assert "memories is a link" in capsys.readouterr().err
        assert memories.names(tmp_path / "others") == ("alice",)


def test_a_file_that_is_no_lock_is_not_taken_for_one(fault, tmp_path):
    with fault("a file of the user's where a command writes", 4):
        (tmp_path / "lock").write_text(PRECIOUS)
        with pytest.raises(ValueError, match="lock is not a lock of this program"):
            Lock(tmp_path)
        assert (tmp_path / "lock").read_text() == PRECIOUS
        (tmp_path / "x.bin.lock").write_text(PRECIOUS)
        with pytest.raises(ValueError, match="lock is not a lock"):
            Lock(tmp_path, name="x.bin.lock")
        assert (tmp_path / "x.bin.lock").read_text() == PRECIOUS
        (tmp_path / "y.bin.lock").symlink_to(tmp_path / "x.bin.lock")
        with pytest.raises(ValueError, match="lock is a link"):
            Lock(tmp_path, name="y.bin.lock")
        assert (tmp_path / "x.bin.lock").read_text() == PRECIOUS
        (tmp_path / "z.bin.lock").hardlink_to(tmp_path / "x.bin.lock")
        with pytest.raises(ValueError, match="lock is not a plain file"):
            Lock(tmp_path, name="z.bin.lock")
        assert (tmp_path / "x.bin.lock").read_text() == PRECIOUS


@pytest.mark.slow
def test_an_export_deletes_no_folder_of_the_users(fault, unbroken, tmp_path):
    mine = tmp_path / "out.partial"
    mine.mkdir()
    (mine / "thesis").write_text(PRECIOUS)
    with fault("a file of the user's where a command writes"):
        assert export_run(unbroken.directory, tmp_path / "out") == tmp_path / "out"
        assert contents(mine) == {"thesis": PRECIOUS}
        assert sorted(x.name for x in tmp_path.iterdir()) == ["out", "out.partial"]
        names = {"weights.safetensors", "config.json"}
        assert {x.name for x in (tmp_path / "out").iterdir()} == names


@pytest.mark.parametrize("name", ["x.bin", "x.idx", "x.bin.partial", "x.idx.partial"])
def test_preparation_takes_no_file_that_it_did_not_make(fault, tmp_path, name):
    (tmp_path / "text.jsonl").write_text('{"text": "some text"}\n' * 100)
    (tmp_path / name).write_text(PRECIOUS)
    with fault("a file of the user's where a command writes"):
        with pytest.raises(ValueError, match=rf"{name} exists without a manifest"):
            prepare(
                text_files(tmp_path / "text.jsonl"),
                out=tmp_path / "x.bin",
                tokenizer="bytes",
                layout="stream",
            )
        assert (tmp_path / name).read_text() == PRECIOUS
