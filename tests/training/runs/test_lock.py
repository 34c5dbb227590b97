"""One session per run directory, with real processes: refused, killed, moved, on another host."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fwpkm_jax.run.train import train
from fwpkm_jax.training.runs import lock as lock_module
from fwpkm_jax.training.runs.lock import LostLockError, RunInUseError, RunLock
from tests.training.tiny_config import get_config

ROOT = Path(__file__).parents[3]

HOLD = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from fwpkm_jax.training.runs.lock import RunLock
    lock = RunLock(Path(sys.argv[1]))
    print("held", flush=True)
    sys.stdin.readline()
    lock.release()
    """
)


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of `tmp_path` until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def read(directory):
    return json.loads((directory / "lock").read_text())


def write(directory, **changes):
    (directory / "lock").write_text(json.dumps({**read(directory), **changes}))


@pytest.fixture
def patience(monkeypatch):
    """Shortens the intervals at which a holder touches the lock and others wait for it."""
    monkeypatch.setattr(lock_module, "BEAT", 0.05)
    monkeypatch.setattr(lock_module, "SILENCE", 0.6)


def test_a_second_session_is_refused_and_the_first_is_named(holder, tmp_path):
    with pytest.raises(RunInUseError) as error:
        RunLock(tmp_path)
    record = read(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} is in use by process {holder.pid} on {os.uname().nodename} since "
        f"{record['started']}; wait until it ends, or choose another --run_dir."
    )
    assert record["started"].startswith(time.strftime("%Y-"))


def test_the_lock_is_free_after_the_holder_has_left(holder, tmp_path):
    holder.communicate("\n", timeout=60)
    assert list(tmp_path.iterdir()) == []
    lines = []
    RunLock(tmp_path, say=lines.append).release()
    assert lines == []


def test_a_killed_holder_locks_nobody_out(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait(60)
    lines = []
    lock = RunLock(tmp_path, say=lines.append)
    assert lines == [
        f"Took over {tmp_path} from process {holder.pid} on {os.uname().nodename} since "
        f"{lines[0].split(' since ')[1]}"
    ]
    assert lines[0].endswith(", which is gone.")
    assert read(tmp_path)["pid"] == os.getpid()
    lock.release()


def test_a_reused_process_number_is_not_taken_for_the_holder(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait(60)
    # The number is that of a process that lives, but that started at another time.
    write(tmp_path, pid=os.getpid())
    RunLock(tmp_path).release()


def test_the_process_table_decides_where_the_system_knows_no_locks(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "_granted", lambda file: True)
    with pytest.raises(RunInUseError, match=f"process {holder.pid} on "):
        RunLock(tmp_path)
    holder.kill()
    holder.wait(60)
    RunLock(tmp_path).release()


def test_a_holder_on_another_host_is_alive_while_it_touches_the_lock(
    tmp_path, monkeypatch, patience
):
    """Two hosts whose file system keeps no locks between them."""
    monkeypatch.setattr(lock_module, "_granted", lambda file: True)
    first = RunLock(tmp_path)
    write(tmp_path, host="elsewhere", boot="another", pid=77)
    with pytest.raises(RunInUseError, match="process 77 on elsewhere since"):
        RunLock(tmp_path)
    first.release()


def test_a_silent_holder_on_another_host_is_gone(tmp_path, patience):
    (tmp_path / "lock").write_text(
        json.dumps({"host": "elsewhere", "boot": "another", "pid": 77, "started": "yesterday"})
    )
    lines = []
    lock = RunLock(tmp_path, say=lines.append)
    assert "belongs to process 77 on elsewhere since yesterday; waiting up to 1 s" in lines[0]
    assert lines[1].startswith(f"Took over {tmp_path} from process 77 on elsewhere")
    lock.release()


def test_a_host_that_was_started_again_holds_nothing(tmp_path, patience):
    lock = RunLock(tmp_path)
    record = read(tmp_path)
    lock.release()
    (tmp_path / "lock").write_text(json.dumps({**record, "boot": "the boot before"}))
    RunLock(tmp_path).release()


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_lock_file_locks_nobody_out(tmp_path, text):
    (tmp_path / "lock").write_text(text)
    RunLock(tmp_path).release()


@pytest.mark.parametrize("how", ["removed", "replaced", "moved away with its directory"])
def test_a_holder_whose_lock_is_gone_learns_it_and_removes_no_other(tmp_path, patience, how):
    run = tmp_path / "run"
    run.mkdir()
    lock = RunLock(run, whole=True)
    lock.check()
    if how == "removed":
        (run / "lock").unlink()
    elif how == "replaced":
        (run / "lock").unlink()
        (run / "lock").write_text("another's")
    else:
        run.rename(tmp_path / "elsewhere")
        run.mkdir()
    time.sleep(0.2)  # Some beats.
    with pytest.raises(LostLockError, match=rf"{run}/lock, by which .* was removed, replaced"):
        lock.check()
    lock.release()
    if how == "replaced":
        assert (run / "lock").read_text() == "another's"


def test_no_second_session_starts_where_the_lock_was_removed_under_its_holder(tmp_path):
    first = RunLock(tmp_path, whole=True)
    (tmp_path / "lock").unlink()
    with pytest.raises(RunInUseError, match=f"{tmp_path} is in use by another process"):
        RunLock(tmp_path, whole=True)
    assert list(tmp_path.iterdir()) == []
    first.release()
    RunLock(tmp_path, whole=True).release()


@pytest.mark.thorough
def test_training_stops_before_it_writes_where_its_lock_is_gone(tmp_path):
    """The lock is removed after step 7; the last checkpoint is that of step 5."""
    tiny = get_config()
    training = dataclasses.replace(tiny.training, validate_every=7)
    experiment = dataclasses.replace(tiny, run_dir=str(tmp_path), training=training)

    def remove(model, memory):
        (tmp_path / "lock").unlink()
        return {"loss": 1.0}

    with pytest.raises(LostLockError, match="Stopped before the next write"):
        train(experiment, validate=remove, stream=io.StringIO())
    records = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["step"] == 6
    assert sorted(x.name for x in (tmp_path / "checkpoints").iterdir()) == ["5"]
    assert not (tmp_path / "results.json").exists()


def test_a_run_in_use_is_not_touched(holder, tmp_path):
    """The second session writes no record, no configuration, no checkpoint."""
    experiment = dataclasses.replace(get_config(), run_dir=str(tmp_path))
    with pytest.raises(RunInUseError, match=f"in use by process {holder.pid}"):
        train(experiment, stream=io.StringIO())
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
