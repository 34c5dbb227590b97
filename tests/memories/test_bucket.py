"""Memories in buckets: the same as in a folder, whole whenever a session is killed, one writer."""

import threading
import time

import jax
import numpy as np
import pytest

from fwpkm_jax import memories
from fwpkm_jax.memories import places
from fwpkm_jax.memories import store as saved_memories
from fwpkm_jax.storage import lock
from fwpkm_jax.storage.lock import Lock, LostLockError, RunInUseError
from fwpkm_jax.storage.stores import Store
from tests.memories.models import ONE, make_model, make_state
from tests.memories.test_memories import Killed, assert_same, change
from tests.training.runs.stores import a_store

# gcsfs gives the client of HTTP a large body as bytes.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
KINDS = ["memory", *(pytest.param(kind, marks=(pytest.mark.thorough, pytest.mark.extras))
         for kind in ("s3", "gs"))]  # fmt: skip


@pytest.fixture(params=KINDS)
def folder(request, monkeypatch):
    with a_store(request.param, monkeypatch) as address:
        yield f"{address}/memories"


@pytest.fixture
def quick(monkeypatch):
    """A lock is given up at once, as its holder is dead; none gives a sign of life."""
    monkeypatch.setattr(lock, "SILENCE", 0.05)
    monkeypatch.setattr(lock, "BEAT", 1000.0)


@pytest.fixture(scope="module")
def model():
    return make_model(ONE)


@pytest.fixture(scope="module")
def state(model):
    return make_state(model)


def elsewhere(call):
    """What a call returns or raises in another thread, which is another session."""
    found = []

    def run():
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def table(state):
    return np.asarray(state.stream.memory["layer_0"].values)


def live(folder, model, state):
    """Everything that can be done with memories; what was found on the way."""
    bob, later, found = change(state, 3, 70), change(state, 7), []
    memories.save(folder, "alice", state, model=model, origin="a test", note=[1])
    memories.fork(folder, "alice", "bob")
    memories.fork(folder, "alice", "alice@monday")
    memories.save(folder, "bob", bob, model=model, keep="memory")
    memories.save(folder, "alice", later, model=model)
    found.append(memories.written_rows(folder, "alice", bob))
    found.append(memories.describe(folder, "alice", forks=False).forks)
    for name in memories.names(folder):
        found.append(memories.describe(folder, name))
        found.append(memories.load(folder, name, model, max_length=8))
    with memories.hold(folder, "alice"):
        memories.restore(folder, "alice", "alice@monday")
        found.append(memories.load(folder, "alice", model))
    found.append(memories.describe_all(folder))
    for call, message in (
        (lambda: memories.fork(folder, "bob", "alice"), "exists in .*; delete it first"),
        (lambda: memories.delete(folder, "alice@monday"), "'alice@monday' is the base of alice"),
        (
            lambda: memories.load(folder, "alicf", model),
            "no memory 'alicf' in .*; there are alice, ",
        ),
    ):
        with pytest.raises((ValueError, OSError), match=message) as error:
            call()
        found.append(str(error.value).replace(str(folder), "FOLDER"))
    memories.delete(folder, "alice@monday", keep_forks=True)
    found.append(memories.load(folder, "alice", model))
    return found


@pytest.mark.slow_cases("memory")
@pytest.mark.thorough("memory")
def test_a_bucket_gives_what_a_folder_gives(folder, model, state, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_memories, "now", lambda: "now")
    expected, actual = live(tmp_path, model, state), live(folder, model, state)
    for one, other in zip(actual, expected, strict=True):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        jax.tree.map(np.testing.assert_array_equal, one, other)
    files = {x.relative_to(tmp_path).as_posix() for x in tmp_path.rglob("*") if x.is_file()}
    assert set(Store(folder).sizes()) == files - {"bases/lock"}
    for name in memories.names(folder):
        memories.delete(folder, name, keep_forks=True)
    assert Store(folder).sizes() == {}
    assert places._open.places == {}


def dying(monkeypatch, number):
    """From the `number`th write on, the session writes to no store, as after a kill; counts."""
    count = [0]

    def wrap(name):
        whole = getattr(Store, name)

        def call(self, *arguments, **options):
            count[0] += 1
            if number is not None and count[0] >= number:
                raise Killed
            return whole(self, *arguments, **options)

        monkeypatch.setattr(Store, name, call)

    for name in ("write", "upload", "remove", "create", "replace"):
        wrap(name)
    return count


@pytest.mark.slow_cases("gs-0")
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))]
)
def test_a_kill_at_any_write_leaves_the_old_memory_or_the_new(folder, model, state, part, quick):
    """Every write of a session in turn is the first that was not made; the next goes on."""
    new, other, store = change(state, 1), change(state, 9), Store(folder)
    monkeypatch = pytest.MonkeyPatch()
    # Or two memories may share a base, or not, as the clock says.
    monkeypatch.setattr(saved_memories, "now", lambda: "now")

    def session():
        memories.fork(folder, "alice", "bob")
        memories.save(folder, "bob", new, model=model)
        memories.save(folder, "alice", new, model=model)
        memories.restore(folder, "alice", "bob")
        memories.delete(folder, "old")
        memories.delete(folder, "bob", keep_forks=True)

    def begin():
        for name in store.sizes():
            store.remove(name)
        memories.save(folder, "alice", state, model=model)
        memories.save(folder, "older", other, model=model)
        memories.fork(folder, "older", "old")
        memories.delete(folder, "older", keep_forks=True)

    begin()
    with monkeypatch.context() as patch:
        count = dying(patch, None)
        session()
    assert_same(memories.load(folder, "alice", model), new)
    assert memories.names(folder) == ("alice",)
    for number in range(1 + part, count[0] + 1, 10):
        begin()
        with monkeypatch.context() as patch:
            dying(patch, number)
            with pytest.raises(Killed):
                session()
        for name, one in memories.describe_all(folder).items():
            assert not isinstance(one, str), one
            found = table(memories.load(folder, name, model))
            known = (other,) if name == "old" else (state, new)
            assert any(np.array_equal(found, table(x)) for x in known)
        if "bob" not in memories.names(folder):
            memories.fork(folder, "alice", "bob")
        for name in memories.names(folder):
            memories.save(folder, name, new, model=model)
            memories.delete(folder, name, keep_forks=True)
        # A lock that no session of this name or kind needed again may still be there.
        assert [x for x in store.sizes() if not x.endswith("lock")] == [], number
    monkeypatch.undo()


@pytest.mark.slow_cases("gs")
def test_a_second_session_is_refused_as_on_a_disk(folder, model, state, monkeypatch):
    monkeypatch.setattr(lock, "SILENCE", 2.0)
    monkeypatch.setattr(lock, "BEAT", 0.05)
    with memories.hold(folder, "alice"):
        memories.save(folder, "alice", state, model=model)
        for call in (
            lambda: memories.save(folder, "alice", state, model=model),
            lambda: memories.delete(folder, "alice"),
        ):
            refused = elsewhere(call)
            assert isinstance(refused, RunInUseError)
            assert f"The memory 'alice' in {folder} is in use by process" in str(refused)
            assert str(refused).endswith("wait until it ends, or choose another name.")
        assert elsewhere(lambda: memories.save(folder, "bob", state, model=model)) is None
        assert memories.names(folder) == ("alice", "bob")
    memories.save(folder, "alice", state, model=model)


@pytest.mark.slow_cases("gs")
def test_a_session_that_lost_its_lock_writes_no_more(folder, model, state, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.05)
    memories.save(folder, "alice", state, model=model)
    with memories.hold(folder, "alice"):
        Store(folder).remove("alice.lock")
        time.sleep(0.3)
        with pytest.raises(LostLockError, match=f"{folder}/alice.lock, by which this session held"):
            memories.save(folder, "alice", change(state, 1), model=model)
    assert_same(memories.load(folder, "alice", model), state)


@pytest.mark.slow_cases("gs")
def test_a_failed_upload_leaves_the_memory_of_before(folder, model, state, monkeypatch):
    new = change(state, 1)
    with memories.hold(folder, "alice"):
        memories.save(folder, "alice", state, model=model)
        with monkeypatch.context() as patch:
            patch.setattr(Store, "upload", lambda *_: (_ for _ in ()).throw(OSError("No cable.")))
            with pytest.raises(OSError, match=r"No cable\."):
                memories.save(folder, "alice", new, model=model)
        assert_same(memories.load(folder, "alice", model), state)
        memories.save(folder, "alice", new, model=model)
        assert_same(memories.load(folder, "alice", model), new)


@pytest.mark.thorough("memory")
def test_a_deletion_that_failed_is_not_made_up_for_by_another_change(
    folder, model, state, monkeypatch
):
    memories.save(folder, "alice", state, model=model)
    with memories.hold(folder, "alice"):
        with monkeypatch.context() as patch:
            patch.setattr(Store, "remove", lambda *_: (_ for _ in ()).throw(OSError("No cable.")))
            with pytest.raises(OSError, match=r"No cable\."):
                memories.delete(folder, "alice")
        Store(folder).remove("bases/lock")
        memories.save(folder, "bob", state, model=model)
        assert memories.names(folder) == ("alice", "bob")
        assert_same(memories.load(folder, "alice", model), state)


@pytest.mark.slow_cases("gs-deleted", "gs-replaced", "gs-restored", "s3-replaced", "s3-restored")
@pytest.mark.parametrize("change_to", ["deleted", "replaced", "restored"])
def test_a_reader_whose_memory_changes_meanwhile_reads_the_new_one(
    folder, model, state, monkeypatch, change_to
):
    new = change(state, 1)
    memories.save(folder, "alice", state, model=model)
    memories.fork(folder, "alice", "bob")
    memories.delete(folder, "alice", keep_forks=True)
    memories.save(folder, "carol", new, model=model)
    whole, asked = Store.download, []

    def another_session():
        if change_to == "restored":  # Its base is newer than the reader's list.
            return memories.restore(folder, "bob", "carol")
        memories.delete(folder, "bob")
        if change_to == "replaced":
            memories.save(folder, "bob", new, model=model)

    def download(self, name, file):
        asked.append(name)
        # Before the reader has the fork, or when it has the fork and not yet its base.
        if len(asked) == (1 if change_to == "restored" else 2):
            assert elsewhere(another_session) is None
        whole(self, name, file)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "download", download)
        if change_to == "deleted":
            said = f"no memory 'bob' in {folder}; there are carol"
            with pytest.raises(FileNotFoundError, match=said):
                memories.load(folder, "bob", model)
        else:
            assert_same(memories.load(folder, "bob", model), new)


@pytest.mark.thorough("memory")
def test_a_base_goes_after_the_last_memory_that_needs_it(folder, model, state, monkeypatch):
    memories.save(folder, "alice", state, model=model)
    memories.fork(folder, "alice", "bob")
    memories.delete(folder, "alice", keep_forks=True)
    removed, whole = [], Store.remove
    monkeypatch.setattr(Store, "remove", lambda self, x: (removed.append(x), whole(self, x)))
    memories.delete(folder, "bob")
    memory, base = (name for name in removed if not name.endswith("lock"))
    assert memory == "bob.safetensors"
    assert base.startswith("bases/")


def test_forks_and_deletes_wait_for_each_other(monkeypatch, model, state):
    monkeypatch.setattr(lock, "SILENCE", 2.0)
    monkeypatch.setattr(lock, "BEAT", 0.05)
    with a_store("memory", monkeypatch) as folder:
        memories.save(folder, "alice", state, model=model)
        held = Lock(Store(folder), name="bases/lock")
        monkeypatch.setattr(lock, "LONGEST_WAIT", 0.0)
        for call in (
            lambda: memories.fork(folder, "alice", "bob"),
            lambda: memories.restore(folder, "bob", "alice"),
            lambda: memories.delete(folder, "alice"),
        ):
            with pytest.raises(RunInUseError, match=r"What memories in .* share is in use"):
                call()
        memories.save(folder, "alice", state, model=model)
        monkeypatch.setattr(lock, "LONGEST_WAIT", 60.0)
        waiting = threading.Timer(0.5, held.release)
        waiting.start()
        memories.fork(folder, "alice", "bob")
        waiting.join()
        assert memories.names(folder) == ("alice", "bob")


@pytest.mark.thorough("memory")
def test_a_list_reads_headers_alone_and_names_what_is_damaged(folder, model, state, monkeypatch):
    memories.save(folder, "alice", state, model=model)
    memories.fork(folder, "alice", "bob")
    store = Store(folder)
    store.write("cut.safetensors", store.read("alice.safetensors")[:-1])
    store.write("empty.safetensors", b"")
    store.write("notes.txt", b"mine")
    expected = [memories.describe(folder, name) for name in ("alice", "bob")]
    with monkeypatch.context() as patch:
        patch.setattr(places, "_HEADER", 64)  # Headers are longer, and read in two steps.
        patch.setattr(Store, "download", None)
        found = memories.describe_all(folder)
        assert [found["alice"], found["bob"]] == expected
        for name in ("cut", "empty"):
            assert found[name].startswith(f"{folder}/{name}.safetensors")
            assert " is damaged" in found[name]
    content = bytearray(store.read("alice.safetensors"))
    content[-1] ^= 1
    store.write("alice.safetensors", bytes(content))
    with pytest.raises(ValueError, match=f"{folder}/alice.safetensors is damaged: its contents"):
        memories.load(folder, "alice", model)
    assert store.read("notes.txt") == b"mine"


@pytest.mark.thorough("memory")
def test_while_a_memory_is_held_what_is_known_is_not_read_again(folder, model, state, monkeypatch):
    memories.save(folder, "start", state, model=model)
    memories.fork(folder, "start", "alice")
    asked, whole = [], Store.download

    def download(self, name, file):
        asked.append(name)
        whole(self, name, file)

    monkeypatch.setattr(Store, "download", download)
    with memories.hold(folder, "alice"):
        for _ in range(2):
            memories.load(folder, "alice", model)
            memories.written_rows(folder, "start", state)
            memories.save(folder, "alice", change(state, 1), model=model)
        assert len(asked) == 3
        assert len(set(asked)) == 3
        elsewhere(lambda: memories.save(folder, "start", change(state, 2), model=model))
        assert memories.written_rows(folder, "start", state)["layer_0/values"][0] == 1
