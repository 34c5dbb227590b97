"""One session per run directory, with real processes: refused, killed, moved, on another host."""

import dataclasses
import io
import json
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fwpkm_jax.run.train import train
from fwpkm_jax.storage import lock as lock_module
from fwpkm_jax.storage.addresses import StoreError
from fwpkm_jax.storage.lock import Lock, LostLockError, RunInUseError
from fwpkm_jax.storage.stores import Store
from tests.training.runs.stores import a_small_gcs, a_store
from tests.training.tiny_config import get_config

ROOT = Path(__file__).parents[2]

HOLD = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from fwpkm_jax.storage.lock import Lock
    lock = Lock(Path(sys.argv[1]))
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
        Lock(tmp_path)
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
    Lock(tmp_path, say=lines.append).release()
    assert lines == []


def test_a_killed_holder_locks_nobody_out(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait(60)
    lines = []
    lock = Lock(tmp_path, say=lines.append)
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
    Lock(tmp_path).release()


def test_the_process_table_decides_where_the_system_knows_no_locks(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "_granted", lambda file: True)
    with pytest.raises(RunInUseError, match=f"process {holder.pid} on "):
        Lock(tmp_path)
    holder.kill()
    holder.wait(60)
    Lock(tmp_path).release()


def test_a_holder_on_another_host_is_alive_while_it_touches_the_lock(
    tmp_path, monkeypatch, patience
):
    """Two hosts whose file system keeps no locks between them."""
    monkeypatch.setattr(lock_module, "_granted", lambda file: True)
    first = Lock(tmp_path)
    write(tmp_path, host="elsewhere", boot="another", pid=77)
    with pytest.raises(RunInUseError, match="process 77 on elsewhere since"):
        Lock(tmp_path)
    first.release()


def test_a_silent_holder_on_another_host_is_gone(tmp_path, patience):
    (tmp_path / "lock").write_text(
        json.dumps({"host": "elsewhere", "boot": "another", "pid": 77, "started": "yesterday"})
    )
    lines = []
    lock = Lock(tmp_path, say=lines.append)
    assert "belongs to process 77 on elsewhere since yesterday; waiting up to 1 s" in lines[0]
    assert lines[1].startswith(f"Took over {tmp_path} from process 77 on elsewhere")
    lock.release()


def test_a_host_that_was_started_again_holds_nothing(tmp_path, patience):
    lock = Lock(tmp_path)
    record = read(tmp_path)
    lock.release()
    (tmp_path / "lock").write_text(json.dumps({**record, "boot": "the boot before"}))
    Lock(tmp_path).release()


@pytest.mark.parametrize("text", ["", "{", '{"pid": 12, "ho'])
def test_a_lock_file_that_was_not_written_whole_locks_nobody_out(tmp_path, text):
    (tmp_path / "lock").write_text(text)
    Lock(tmp_path).release()


@pytest.fixture(
    params=[
        "disk",
        "memory",
        *(
            pytest.param(kind, marks=(pytest.mark.thorough, pytest.mark.extras))
            for kind in ("s3", "gs")
        ),
    ]
)
def place(request, monkeypatch, tmp_path):
    """A folder on a disk or in a bucket, which is not there yet in a bucket."""
    if request.param == "disk":
        yield tmp_path
    else:
        with a_store(request.param, monkeypatch) as address:
            yield Store(address)


def content_of(place, name="lock"):
    if isinstance(place, Store):
        found = place.versioned(name, most=10**7)
        return found and found[0]
    return (place / name).read_bytes() if (place / name).exists() else None


def put(place, content, name="lock"):
    place.write(name, content) if isinstance(place, Store) else (place / name).write_bytes(content)


def stop_beating(lock):
    """As of a process that is suspended; the system's lock of the file is gone, too."""
    lock._heart.end()


@pytest.fixture
def elsewhere(monkeypatch):
    """Every lock seems to be taken on another machine, and no file system knows locks."""
    here = lock_module._here
    monkeypatch.setattr(lock_module, "_here", lambda: {**here(), "boot": secrets.token_hex(4)})
    monkeypatch.setattr(lock_module, "_granted", lambda file: True)


@pytest.mark.slow_cases("gs")
def test_one_session_at_a_time_has_a_lock(place, patience, elsewhere):
    first = Lock(place)
    with pytest.raises(RunInUseError, match=rf"{place} is in use by process {os.getpid()} on "):
        Lock(place)
    first.check()
    first.release()
    assert content_of(place) is None
    Lock(place).release()


@pytest.mark.slow_cases("gs")
def test_a_lock_of_the_silent_is_taken_over(place, patience, elsewhere):
    said = []
    first = Lock(place)
    stop_beating(first)
    second = Lock(place, say=said.append)
    assert f"lock belongs to process {os.getpid()} on " in said[0]
    assert said[1].startswith(f"Took over {place} from process {os.getpid()}")
    second.release()


@pytest.mark.slow_cases("gs")
def test_a_holder_that_is_known_to_be_gone_is_not_waited_for(place):
    record = {**lock_module._record(), "pid": 2**22 + 1}  # No system has so many.
    put(place, json.dumps(record).encode())
    began = time.monotonic()
    Lock(place).release()
    assert time.monotonic() - began < lock_module.SILENCE / 2


# What a client of gs:// says of nine megabytes in one piece.
@pytest.mark.slow_cases(
    "gs-bytes",
    "gs-large",
    "gs-list",
    "gs-number",
    "gs-object",
    "gs-text",
    "s3-bytes",
    "s3-large",
    "s3-list",
    "s3-number",
    "s3-object",
)
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize(
    "content",
    [
        b"combination of the safe: 17-4-99\n",
        b"[]",
        b"7",
        b'{"a": 1}',
        b"\xff\xfe",
        b"x" * 9_000_000,
    ],
    ids=["text", "list", "number", "object", "bytes", "large"],
)
def test_what_is_no_record_of_this_program_is_refused_and_stays(place, patience, content):
    for name in ("lock", "alice.lock"):
        put(place, content, name)
        with pytest.raises(ValueError, match=f"{name} is not a lock of this program; move it away"):
            Lock(place, name=name)
        assert content_of(place, name) == content


@pytest.mark.slow_cases("gs")
def test_a_holder_stops_at_its_next_write_after_another_took_the_lock(place, patience, monkeypatch):
    """Also where no time passed by its clock, as on a machine that slept, and no beat came."""
    monkeypatch.setattr(lock_module, "BEAT", 1000.0)
    first = Lock(place)
    first.check()
    other = b'{"pid": 1, "host": "b", "started": "now", "token": "other", "beat": 9}'
    if isinstance(place, Path):
        (place / "lock").unlink()
    put(place, other)
    with pytest.raises(LostLockError, match="was removed, replaced or moved"):
        first.check()
    stop_beating(first)
    first._place.remove()
    assert content_of(place) == other


def test_the_clock_of_locks_goes_on_while_the_machine_sleeps(monkeypatch):
    monkeypatch.setattr(time, "clock_gettime", lambda clock: (clock, 7.0))
    assert lock_module._now() == (time.CLOCK_BOOTTIME, 7.0)


def test_a_store_that_is_away_stops_nobody_before_another_may_have_the_lock(monkeypatch):
    monkeypatch.setattr(lock_module, "BEAT", 0.1)
    monkeypatch.setattr(lock_module, "SILENCE", 1.0)
    with a_store("memory", monkeypatch) as address:
        held = Lock(Store(address))
        files, began = type(Store(address)._files), time.monotonic()
        with monkeypatch.context() as patch:
            patch.setattr(files, "info", lambda *_, **__: (_ for _ in ()).throw(OSError("Away.")))
            while time.monotonic() - began < 0.8:
                held.check()
                held.check(ask=False)
                time.sleep(0.02)
        time.sleep(0.4)  # Some beats.
        held.check()
        with monkeypatch.context() as patch:
            patch.setattr(files, "info", lambda *_, **__: (_ for _ in ()).throw(OSError("Away.")))
            time.sleep(1.1)
            with pytest.raises(LostLockError):
                held.check()
        held.release()
        assert Store(address).sizes() == {}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_beat_whose_answer_is_lost_costs_nothing(monkeypatch, patience, when):
    """The store has written it, or not; the holder is told of an error in both cases."""
    with a_store("memory", monkeypatch) as address:
        held, whole = Lock(Store(address)), Store.replace
        failed = []

        def replace(self, *arguments):
            if when == "after":
                whole(self, *arguments)
            failed.append(0)
            raise StoreError("503")

        with monkeypatch.context() as patch:
            patch.setattr(Store, "replace", replace)
            while len(failed) < 3:
                time.sleep(0.02)
        held.check()
        time.sleep(0.2)
        held.check()
        held.release()


@pytest.mark.extras
def test_a_store_that_ignores_conditions_is_refused(monkeypatch):
    with a_small_gcs(monkeypatch) as small:
        small.ignores_conditions = True
        with pytest.raises(ValueError, match="two sessions could not be kept apart"):
            Lock(Store("gs://bucket/run"))


@pytest.mark.parametrize("how", ["removed", "moved away with its directory"])
def test_a_holder_whose_lock_is_gone_learns_it_by_itself(tmp_path, patience, how):
    run = tmp_path / "run"
    run.mkdir()
    lock = Lock(run, whole=True)
    lock.check()
    if how == "removed":
        (run / "lock").unlink()
    else:
        run.rename(tmp_path / "elsewhere")
        run.mkdir()
    time.sleep(0.2)  # Some beats.
    assert lock._lost
    with pytest.raises(LostLockError, match=rf"{run}/lock, by which .* was removed, replaced"):
        lock.check()
    lock.release()


def test_a_removed_object_stops_its_holder_by_itself(monkeypatch, patience):
    with a_store("memory", monkeypatch) as address:
        held = Lock(Store(address))
        Store(address).remove("lock")
        time.sleep(0.3)
        with pytest.raises(LostLockError):
            held.check(ask=False)
        held.release()


def test_no_second_session_starts_where_the_lock_was_removed_under_its_holder(tmp_path):
    first = Lock(tmp_path, whole=True)
    (tmp_path / "lock").unlink()
    with pytest.raises(RunInUseError, match=f"{tmp_path} is in use by another process"):
        Lock(tmp_path, whole=True)
    assert list(tmp_path.iterdir()) == []
    first.release()
    Lock(tmp_path, whole=True).release()


@pytest.mark.slow
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
