"""Runs in buckets: what a killed upload left is never taken for whole, and one session writes."""

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fwpkm_jax.storage import lock
from fwpkm_jax.storage.stores import Store
from fwpkm_jax.storage.sync import Part, Versions
from fwpkm_jax.training.runs import mirror as mirror_module
from fwpkm_jax.training.runs.mirror import Mirror, run_folder
from tests.training.runs.stores import SERVED, a_store, lines

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
    monkeypatch.setattr(lock, "SILENCE", 0.3)
    monkeypatch.setattr(lock, "BEAT", 0.05)


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


@pytest.mark.slow_cases("gs")
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


@pytest.mark.slow_cases("gs-0")
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))]
)
def test_a_kill_at_any_write_leaves_a_whole_run_that_goes_on(address, part, impatient):
    """Every write of a run of 40 steps in turn is the last one that was not made."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(lock, "BEAT", 1000.0)
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


@pytest.mark.slow_cases("gs")
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


@pytest.mark.thorough("memory")
def test_a_checkpoint_that_was_set_aside_stays_in_the_bucket_and_its_step_is_saved_again(address):
    train_to(address, 20)
    before = {x for x in Store(address).sizes() if x.startswith("checkpoints/20-")}
    mirror = Mirror(address)
    mirror._work = lambda: None
    mirror.claim()
    for saved_again in (False, True):
        if not saved_again:
            (mirror.folder / "damaged_checkpoints").mkdir()
            place = mirror.folder / "damaged_checkpoints" / "20"
            (mirror.folder / "checkpoints" / "20").rename(place)
        else:
            write_run(mirror.folder, 20)
        mirror.write_back()
        names = set(Store(address).sizes())
        assert before <= names
        assert any(x.startswith("damaged_checkpoints/20-") for x in names) == saved_again
    mirror.close()
    assert read_run(address) == ([10, 20], 20)
    assert train_to(address, 30) == 20
    assert before <= set(Store(address).sizes())


@pytest.mark.thorough("memory")
def test_a_reader_writes_back_what_it_made(address):
    train_to(address, 20)
    with run_folder(address) as folder:
        (folder / "results").mkdir()
        (folder / "results" / "ppl.json").write_text("{}")
    assert Store(address).read("results/ppl.json") == b"{}"
    assert read_run(address) == ([10, 20], 20)
    with pytest.raises(FileNotFoundError, match="holds no run"), run_folder(f"{address}/none"):
        pass


@pytest.mark.thorough("memory")
def test_memories_of_a_run_are_left_to_their_own_sessions(address):
    Store(address).write("memories/ana.safetensors", b"ana")
    train_to(address, 20)
    with run_folder(address) as folder:
        assert not (folder / "memories").exists()
        (folder / "memories").mkdir()
        (folder / "memories" / "bob.safetensors").touch()
    names = Store(address).sizes()
    assert {name for name in names if "memories" in name} == {"memories/ana.safetensors"}


def write_part(mirror, process, step):
    """What one of two processes leaves of a checkpoint in its own folder."""
    place = mirror.folder / "checkpoints" / str(step)
    for name, content in {
        "position/metadata": b"p%d" % process,
        "params/_METADATA": b"m",
        f"params/array_metadatas/process_{process}": b"a%d" % process,
        f"params/ocdbt.process_{process}/d/0": b"%d %d" % (process, step),
    }.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)


def two_processes(address):
    """A session of two processes, each with a folder of its own; nothing is written by threads."""
    mirrors = [Mirror(address, part=Part(number, 2, "0123456789abcdef")) for number in range(2)]
    for mirror in mirrors:
        mirror._work = lambda: None
        mirror.claim()
    return mirrors


def whole_steps(address):
    store = Store(address)
    versions = Versions(store, "checkpoints")
    versions.look(store.sizes())
    return versions.whole


@pytest.mark.slow_cases("gs")
def test_a_checkpoint_of_two_processes_is_whole_once_both_have_written(address, tmp_path):
    first, second = two_processes(address)
    (first.folder / "config.json").write_text("{}")
    (second.folder / "config.json").write_text("of the second")
    for mirror, process in ((first, 0), (second, 1)):
        write_part(mirror, process, 10)
    assert not first.write_back()
    assert whole_steps(address) == set()
    assert second.write_back()
    assert whole_steps(address) == set()
    assert first.write_back()
    assert whole_steps(address) == {10}
    # The one before stays until the newest is whole, also where it is gone here.
    for mirror, process in ((first, 0), (second, 1)):
        (mirror.folder / "checkpoints" / "10").rename(tmp_path / f"{process}")
        write_part(mirror, process, 20)
    assert not first.write_back()
    assert whole_steps(address) == {10}
    second.close()
    first.close()
    assert whole_steps(address) == {20}
    store = Store(address)
    versions = Versions(store, "checkpoints")
    versions.look(store.sizes())
    assert versions.fetch(20, tmp_path / "20")
    found = {
        x.relative_to(tmp_path / "20").as_posix(): x.read_bytes()
        for x in (tmp_path / "20").rglob("*")
        if x.is_file()
    }
    assert found == {
        "position/metadata": b"p0",
        "params/_METADATA": b"m",
        "params/array_metadatas/process_0": b"a0",
        "params/array_metadatas/process_1": b"a1",
        "params/ocdbt.process_0/d/0": b"0 20",
        "params/ocdbt.process_1/d/0": b"1 20",
    }
    # No part list stays, and of the first checkpoint nothing.
    assert len(store.sizes()) == 2 + len(found)
    assert store.read("config.json") == b"{}"


# Orbax leaves its other readers behind when one fails.
@pytest.mark.thorough("memory")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_first_process_that_fails_waits_for_the_parts_of_others_but_not_long(
    address, monkeypatch, caplog
):
    monkeypatch.setattr(mirror_module, "PATIENCE", 0.2)
    first, second = two_processes(address)
    for mirror, process in ((first, 0), (second, 1)):
        write_part(mirror, process, 10)
        write_part(mirror, process, 20)
    (second.folder / "checkpoints" / "20").rename(second.folder / "checkpoints" / "late")
    second.write_back()
    first.close()
    assert "Another process has not written its part of the newest checkpoint" in caplog.text
    assert whole_steps(address) == {10}
    # The second process still writes; the next session removes what it left.
    (second.folder / "checkpoints" / "late").rename(second.folder / "checkpoints" / "20")
    second.close()
    assert any(name.startswith("checkpoints/20-") for name in Store(address).sizes())
    assert whole_steps(address) == {10}
    again = Mirror(address)
    again.claim()
    assert not any(name.startswith("checkpoints/20-") for name in Store(address).sizes())
    # These parts are no arrays, and reading them would name the checkpoint.
    assert f"The parts of {again.folder}/checkpoints/10/params cannot be merged" in caplog.text
    again.abandon()


def test_a_kill_at_any_write_of_two_processes_leaves_the_checkpoint_before(monkeypatch, impatient):
    """Every write of both processes in turn is the last one that was not made."""
    monkeypatch.setattr(mirror_module, "_merge", lambda checkpoint: None)  # No arrays of Orbax.
    monkeypatch.setattr(lock, "BEAT", 1000.0)
    with a_store("memory", monkeypatch) as address:
        for number in itertools.count(1):
            first, second = two_processes(address)
            for mirror, process in ((first, 0), (second, 1)):
                write_part(mirror, process, 10)
            assert second.write_back()
            assert first.write_back()
            for mirror, process in ((first, 0), (second, 1)):
                write_part(mirror, process, 20)
            with monkeypatch.context() as patch:
                count = killing(patch, number)
                try:
                    second.write_back()
                    first.write_back()
                except Killed:
                    pass
            whole = whole_steps(address)
            assert whole in ({10}, {10, 20})
            for mirror in (first, second):
                mirror.abandon()
            again = Mirror(address)
            again._work = lambda: None
            again.claim()
            for step in whole:
                parts = (again.folder / "checkpoints" / str(step) / "params").glob("ocdbt*/d/0")
                assert sorted(x.read_bytes() for x in parts) == [b"0 %d" % step, b"1 %d" % step]
            again.abandon()
            for name in Store(address).sizes():
                Store(address).remove(name)
            if count[0] < number:
                assert whole == {10, 20}
                break
        assert number > 8  # Seven files, a list, the marker, and the list's removal.


_UPLOADING = """
import sys
from pathlib import Path
from fwpkm_jax.storage import lock
from fwpkm_jax.training.runs.mirror import Mirror
lock.BEAT, lock.SILENCE = 0.1, 0.5
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
