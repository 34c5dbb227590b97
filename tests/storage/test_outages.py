"""Every request of a session fails in turn, or is the first of an outage: nothing is lost."""

import pytest

from fwpkm_jax import memories
from fwpkm_jax.memories import store as saved_memories
from fwpkm_jax.storage import lock
from fwpkm_jax.storage.stores import Store
from tests.memories.models import ONE, make_model, make_state
from tests.memories.test_memories import assert_same, change
from tests.storage.outages import ONCE, failing
from tests.training.runs.stores import a_store
from tests.training.runs.test_mirror import read_run, train_to

PARTS = [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12))]
"""A part tries every twelfth request, from its number on."""
HOW = (*ONCE, "away")


@pytest.fixture
def address(monkeypatch):
    """An empty folder of a store; a lock is taken over at once, as its holder gives no sign."""
    monkeypatch.setattr(lock, "BEAT", 1000.0)
    with a_store("memory", monkeypatch) as address:
        yield address


def outages(session, begin, part, how):
    """Number and count of a session's requests, having failed each of a part; what it raised."""
    begin()
    with pytest.MonkeyPatch.context() as patch:
        count = failing(patch)
        session()
    for number in range(1 + part, count[0] + 1, 12):
        begin()
        raised = None
        with pytest.MonkeyPatch.context() as patch:
            failing(patch, number, how)
            try:
                session()
            except (OSError, ValueError) as error:
                raised = error
        yield number, count[0], raised


def empty(address):
    store = Store(address)
    for name in store.sizes():
        store.remove(name)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("part", PARTS)
def test_no_request_that_fails_costs_a_run_its_newest_whole_checkpoint(
    address, part, how, monkeypatch
):
    """91 requests of a session of 20 steps: claim, checkpoints, removals, end.

    One that fails once is asked again, so the session ends as without it. In an outage it ends
    with an error of the store. What was whole before is found then, and the run goes on.
    """

    def begin():
        empty(address)
        train_to(address, 20)

    for number, count, raised in outages(lambda: train_to(address, 40), begin, part, how):
        assert count > 80
        steps, records = read_run(address)
        if raised is not None:
            assert how == "away", number
            assert "503 Slow Down" in str(raised), number
            assert max(steps) >= 20, number
            assert records >= max(steps)
            with monkeypatch.context() as patch:
                patch.setattr(lock, "SILENCE", 0.02)
                assert train_to(address, 50) == max(steps)
            assert read_run(address) == ([40, 50], 50)
        else:  # Also an outage in which only the lock could not be given back.
            assert how != "away" or number > count - 4
            assert (steps, records) == ([30, 40], 40)
        left = [x for x in Store(address).sizes() if x.startswith("checkpoints/")]
        assert len(left) == 2 * (1 + 3), number


@pytest.fixture(scope="module")
def model():
    return make_model(ONE)


@pytest.mark.by_default("0-503", thorough=["0-cut"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("part", PARTS)
def test_no_request_that_fails_costs_a_memory(address, model, part, how, monkeypatch):
    """121 requests of a session that forks, saves, restores and deletes memories; as for runs."""
    # Or two memories may share a base, or not, as the clock says.
    monkeypatch.setattr(saved_memories, "now", lambda: "now")
    state = make_state(model)
    new = change(state, 1)

    def session():
        memories.fork(address, "alice", "bob")
        memories.save(address, "bob", new, model=model)
        memories.restore(address, "alice", "bob")
        memories.describe_all(address)
        memories.delete(address, "bob", keep_forks=True)

    def begin():
        empty(address)
        memories.save(address, "alice", state, model=model)

    for number, count, raised in outages(session, begin, part, how):
        found = memories.load(address, "alice", model)
        if raised is not None:
            assert how == "away", number
            assert "503 Slow Down" in str(raised), number
            table = found.stream.memory["layer_0"].values
            assert any((table == x.stream.memory["layer_0"].values).all() for x in (state, new))
            with monkeypatch.context() as patch:
                patch.setattr(lock, "SILENCE", 0.02)
                for name in memories.names(address):
                    memories.save(address, name, new, model=model)
        else:  # Also an outage in which only the two locks could not be given back.
            assert how != "away" or number > count - 6
            assert memories.names(address) == ("alice",)
            assert_same(found, new)
        assert all(not isinstance(x, str) for x in memories.describe_all(address).values())
