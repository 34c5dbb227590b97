"""Runs in buckets: what a killed upload left is never taken for whole, and one session writes."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fwpkm_jax import stores
from fwpkm_jax.outside_files import OutsideFileError
from fwpkm_jax.stores import Store
from fwpkm_jax.training.runs import lock, store_lock
from fwpkm_jax.training.runs.lock import LostLockError, RunInUseError
from fwpkm_jax.training.runs.mirror import Mirror, local_copy
from fwpkm_jax.training.runs.store_lock import StoreLock
from tests.training.runs.stores import SERVED, a_small_gcs, a_store, lines

# gcsfs gives the client of HTTP a large body as bytes.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


@pytest.fixture(
    params=[
        "memory",
        *(
            pytest.param(kind, marks=(pytest.mark.thorough, pytest.mark.extras))
            for kind in ("s3", "gs")
        ),
    ]
)
def address(request, monkeypatch):
    with a_store(request.param, monkeypatch) as address:
        yield address


@pytest.fixture
def impatient(monkeypatch):
    """Locks are given up after 0.3 s without a sign of life."""
    monkeypatch.setattr(store_lock, "SILENCE", 0.3)
    monkeypatch.setattr(store_lock, "BEAT", 0.05)


def test_objects_are_read_written_listed_and_removed(address, tmp_path):
    store = Store(address)
    assert store.sizes() == {}
    store.write("a/b c.txt", b"one")
    (tmp_path / "x").write_bytes(b"x" * 6_000_000)
    store.upload(tmp_path / "x", "big")
    assert store.sizes() == {"a/b c.txt": 3, "big": 6_000_000}
    assert store.read("a/b c.txt") == b"one"
    store.download("big", tmp_path / "y")
    assert (tmp_path / "y").read_bytes() == b"x" * 6_000_000
    store.remove("big")
    store.remove("big")
    assert list(store.sizes()) == ["a/b c.txt"]
    with pytest.raises(FileNotFoundError, match=rf"There is no {address}/none"):
        store.read("none")


def test_an_object_appears_when_its_upload_is_complete(monkeypatch, tmp_path):
    (tmp_path / "x").write_bytes(bytes(100_000_000))
    with a_store("memory", monkeypatch) as address:
        store, seen = Store(address), set()
        upload = threading.Thread(target=store.upload, args=(tmp_path / "x", "x"))
        upload.start()
        while upload.is_alive():
            seen |= set(store.sizes().values())
        upload.join()
        assert seen <= {100_000_000}


def test_conditional_writes_hold(address):
    store = Store(address)
    assert store.versioned("x") is None
    assert store.create("x", b"one")
    assert not store.create("x", b"two")
    content, version = store.versioned("x")
    assert content == b"one"
    assert store.replace("x", b"three", version)
    assert not store.replace("x", b"four", version)
    assert store.read("x") == b"three"
    store.remove("x")
    assert not store.replace("x", b"five", version)
    assert store.sizes() == {}


def test_of_many_that_create_at_once_one_does(address):
    won, start = [], threading.Barrier(8)

    def create(number):
        start.wait()
        if Store(address).create("lock", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert Store(address).read("lock") == b"%d" % won[0]


def test_a_second_session_is_refused_while_the_first_lives(address, impatient):
    first = StoreLock(Store(address))
    with pytest.raises(RunInUseError, match=r"run is in use by process \d+ on "):
        StoreLock(Store(address))
    first.check()
    first.release()
    StoreLock(Store(address)).release()
    assert Store(address).sizes() == {}


def test_a_lock_of_the_dead_is_taken_over_and_its_holder_stops(address, impatient, monkeypatch):
    said = []
    first = StoreLock(Store(address))
    first._released.set()  # No sign of life any more.
    first._heart.join()
    second = StoreLock(Store(address), say=said.append)
    assert any("Took over" in line for line in said)
    time.sleep(0.1)
    with pytest.raises(LostLockError, match="was removed or replaced"):
        first.check()
    first.release()  # Leaves the lock of the second.
    second.check()
    second.release()


def test_a_removed_lock_stops_its_holder(address, impatient):
    held = StoreLock(Store(address))
    Store(address).remove("lock")
    time.sleep(0.3)
    with pytest.raises(LostLockError):
        held.check()
    held.release()


def test_a_store_that_does_not_answer_for_a_while_ends_no_session(monkeypatch, impatient):
    with a_store("memory", monkeypatch) as address:
        held = StoreLock(Store(address))
        files = type(held._store._files)
        with monkeypatch.context() as patch:
            patch.setattr(files, "info", lambda *_, **__: (_ for _ in ()).throw(OSError("Away.")))
            time.sleep(0.15)
        before = held._alive_at
        time.sleep(0.15)
        assert held._alive_at > before
        held.check()
        held.release()


def test_what_could_not_be_written_stays_in_a_folder_that_is_named(monkeypatch):
    with a_store("memory", monkeypatch) as address:
        mirror = Mirror(address)
        mirror.claim()
        (mirror.folder / "config.json").write_text("{}")
        with monkeypatch.context() as patch:
            patch.setattr(
                type(mirror.store._files), "pipe_file", lambda *_: (_ for _ in ()).throw(OSError)
            )
            with pytest.raises(OSError, match=f"what is not yet there lies in {mirror.folder}"):
                mirror.close()
        assert (mirror.folder / "config.json").exists()
        mirror.abandon()


@pytest.mark.extras
def test_a_store_that_ignores_conditions_is_refused(monkeypatch):
    with a_small_gcs(monkeypatch) as small:
        small.ignores_conditions = True
        with pytest.raises(ValueError, match="two sessions could not be kept apart"):
            StoreLock(Store("gs://bucket/run"))


@pytest.mark.extras
@pytest.mark.parametrize("address", ["s3://bucket", "gs://bucket/"])
def test_a_bucket_alone_is_refused(address):
    pytest.importorskip({"s3": "s3fs", "gs": "gcsfs"}[address[:2]])
    with pytest.raises(ValueError, match="names a bucket and no folder in it"):
        Store(address)


def test_names_that_lead_out_of_the_folder_are_refused():
    for name in ("../x", "/x", "a/../../x", "a\\b", "a//b", "./a"):
        with pytest.raises(OutsideFileError, match="which is no path in a folder"):
            stores.checked_name(name, "gs://b/r")


def write_run(folder, steps):
    """What training leaves in its folder after `steps` steps, a checkpoint of each tenth."""
    (folder / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text(lines(steps))
    (folder / "tensorboard").mkdir(exist_ok=True)
    (folder / "tensorboard" / "events").write_text("e" * steps)
    (folder / ".metrics.jsonl.0123456789abcdef.tmp").write_text("unfinished")
    kept = range(max(10, steps - 19), steps + 1)
    for step in (step for step in kept if step % 10 == 0):
        place = folder / "checkpoints" / str(step)
        if not place.exists():
            (place / "params" / "d").mkdir(parents=True)
            for name, content in checkpoint(step).items():
                (place / name).write_bytes(content)
    (folder / "checkpoints" / f"{steps + 10}.orbax-checkpoint-tmp").mkdir(exist_ok=True)
    for place in (folder / "checkpoints").iterdir():
        if place.name.isdecimal() and int(place.name) not in kept:
            for file in sorted(place.rglob("*"), reverse=True):
                file.unlink() if file.is_file() else file.rmdir()
            place.rmdir()


def checkpoint(step):
    return {"params/d/0": b"%d" % step * 50, "params/manifest": b"m%d" % step, "position": b"p"}


def train_to(address, end):
    """A session of a run that saves every ten steps; returns what it started from."""
    mirror = Mirror(address)
    mirror._work = lambda: None  # Written back at every save instead.
    mirror.claim()
    start = max((int(x.name) for x in (mirror.folder / "checkpoints").glob("[0-9]*")), default=0)
    for steps in range(start + 10, end + 1, 10):
        write_run(mirror.folder, steps)
        mirror.write_back()
    mirror.close()
    return start


def read_run(address):
    """Steps of the checkpoints and of the records, having compared every file."""
    mirror = Mirror(address)
    mirror.fetch()
    found = sorted(int(x.name) for x in (mirror.folder / "checkpoints").glob("*"))
    for step in found:
        place = mirror.folder / "checkpoints" / str(step)
        files = {x.relative_to(place).as_posix(): x.read_bytes() for x in place.rglob("*")
                 if x.is_file()}  # fmt: skip
        assert files == checkpoint(step)
    metrics = mirror.folder / "metrics.jsonl"
    records = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    if records:
        assert (mirror.folder / "config.json").exists()
    mirror.close()
    return found, records


def test_a_run_comes_back_as_it_was(address, impatient):
    assert train_to(address, 30) == 0
    assert read_run(address) == ([20, 30], 30)
    assert train_to(address, 40) == 30
    assert read_run(address) == ([30, 40], 40)
    names = Store(address).sizes()
    assert {x.split("/")[0] for x in names} == {
        "config.json", "metrics.jsonl", "tensorboard", "checkpoints"
    }  # fmt: skip
    assert len([x for x in names if x.startswith("checkpoints/")]) == 2 * (1 + 3)


class Killed(BaseException):
    pass


def killing(monkeypatch, number):
    """Ends the process, as far as it can tell, at the `number`th write; counts them."""
    count = [0]

    def dying(name):
        whole = getattr(Store, name)

        def call(self, *arguments, **options):
            count[0] += 1
            if count[0] == number:
                raise Killed
            return whole(self, *arguments, **options)

        monkeypatch.setattr(Store, name, call)

    for name in ("write", "upload", "remove", "create", "replace"):
        dying(name)
    return count


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))]
)
def test_a_kill_at_any_write_leaves_a_whole_run_that_goes_on(address, part, impatient):
    """Every write of a run of 40 steps in turn is the last one that was not made."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(store_lock, "BEAT", 1000.0)
    with monkeypatch.context() as patch:
        count = killing(patch, None)
        train_to(address, 40)
    store = Store(address)
    for number in range(1 + part, count[0] + 1, 6):
        for name in store.sizes():
            store.remove(name)
        with monkeypatch.context() as patch:
            killing(patch, number)
            with pytest.raises(Killed):
                train_to(address, 40)
        steps, records = read_run(address)
        assert records >= max(steps, default=0)
        assert train_to(address, 50) == max(steps, default=0)
        assert read_run(address) == ([40, 50], 50)
        left = [x for x in store.sizes() if x.startswith("checkpoints/")]
        assert len(left) == 2 * (1 + 3), number
    monkeypatch.undo()


def test_a_file_that_is_not_what_was_saved_is_named_and_the_one_before_counts(address, caplog):
    train_to(address, 20)
    store = Store(address)
    (bad,) = (x for x in store.sizes() if x.startswith("checkpoints/20-") and x.endswith("d/0"))
    store.write(bad, b"20" * 49 + b"21")
    mirror = Mirror(address)
    mirror.fetch()
    assert [x.name for x in (mirror.folder / "checkpoints").iterdir()] == ["10"]
    assert f"{bad} is not what was saved" in caplog.text
    mirror.close()


@pytest.mark.parametrize(
    "marker",
    [b"{", b"[]", b"{}", json.dumps({"folder": "../x", "files": {"a": [1, "b"]}}).encode(),
     json.dumps({"folder": "10-x", "files": {"../../a": [1, "b"]}}).encode(),
     json.dumps({"folder": "10-x", "files": {"a": 7}}).encode()],
    ids=range(6),
)  # fmt: skip
def test_a_damaged_marker_is_no_checkpoint(monkeypatch, marker, caplog):
    with a_store("memory", monkeypatch) as address:
        Store(address).write("checkpoints/10.json", marker)
        assert read_run(address) == ([], 0)
        assert "Skipping a damaged checkpoint: " in caplog.text
        assert "memory://bucket/run/checkpoints/10" in caplog.text


def test_a_reader_writes_back_what_it_made(address):
    train_to(address, 20)
    with local_copy(address) as folder:
        (folder / "results").mkdir()
        (folder / "results" / "ppl.json").write_text("{}")
    assert Store(address).read("results/ppl.json") == b"{}"
    assert read_run(address) == ([10, 20], 20)
    with pytest.raises(FileNotFoundError, match="holds no run"), local_copy(f"{address}/none"):
        pass


def test_memories_of_a_run_are_left_to_their_own_sessions(address):
    Store(address).write("memories/ana.safetensors", b"ana")
    train_to(address, 20)
    with local_copy(address) as folder:
        assert not (folder / "memories").exists()
        (folder / "memories").mkdir()
        (folder / "memories" / "bob.safetensors").touch()
    names = Store(address).sizes()
    assert {name for name in names if "memories" in name} == {"memories/ana.safetensors"}


def test_the_lock_of_a_folder_has_the_same_constants():
    assert (store_lock.BEAT, store_lock.SILENCE) == (lock.BEAT, lock.SILENCE)


_UPLOADING = """
import sys
from pathlib import Path
from fwpkm_jax.training.runs import store_lock
from fwpkm_jax.training.runs.mirror import Mirror
store_lock.BEAT, store_lock.SILENCE = 0.1, 0.5
mirror = Mirror(sys.argv[1])
mirror._work = lambda: None
mirror.claim()
place = mirror.folder / "checkpoints"
step = max((int(x.name) for x in place.glob("[0-9]*")), default=0)
print("claimed", flush=True)
while True:
    step += 10
    (mirror.folder / "config.json").write_text("{}")
    (mirror.folder / "metrics.jsonl").write_text("{}\\n" * step)
    for number in range(4):
        file = place / str(step) / str(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"%d" % (step + number) * 400_000)
    mirror.write_back()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", SERVED)
def test_a_process_that_is_killed_while_it_uploads_leaves_whole_checkpoints(
    kind, tmp_path, monkeypatch
):
    """SIGKILL, at ten times that differ, of a process that uploads without end."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    newest = 0
    with a_store(kind, monkeypatch) as address:
        for number in range(10):
            process = subprocess.Popen(
                [sys.executable, "-c", _UPLOADING, address], stdout=subprocess.PIPE, text=True
            )
            assert process.stdout is not None
            assert process.stdout.readline() == "claimed\n"
            time.sleep(0.2 + 0.25 * number)
            process.kill()
            process.wait()
            process.stdout.close()
            mirror = Mirror(address)
            mirror.fetch()
            found = sorted(int(x.name) for x in (mirror.folder / "checkpoints").glob("*"))
            for step in found:
                for part in range(4):
                    content = (mirror.folder / "checkpoints" / str(step) / str(part)).read_bytes()
                    assert content == b"%d" % (step + part) * 400_000
            assert max(found, default=0) >= newest
            newest = max(found, default=0)
            mirror.close()
        assert newest > 0
