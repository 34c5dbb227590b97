"""Saved memories: what comes back, what a fork costs, what is refused."""

import contextlib
import dataclasses
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax import memories
from fwpkm_jax.memories import file, rows
from fwpkm_jax.overlays import to_overlay
from fwpkm_jax.rules import RULES, AbstractChunkRule
from fwpkm_jax.storage.lock import RunInUseError
from tests.memories.models import EVERY, ONE, make_model, make_state, with_rule

CHUNK_RULES = [
    name
    for name, rule in RULES.items()
    if isinstance(rule, type) and issubclass(rule, AbstractChunkRule)
]


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def change(state, *changed, value=1.5):
    """The state with another number in some rows of layer_0's table."""
    values = np.array(state.stream.memory["layer_0"].values)
    values[:, list(changed)] = value
    memory = {"layer_0": state.stream.memory["layer_0"]._replace(values=values)}
    return state._replace(stream=state.stream._replace(memory=memory))


@pytest.fixture(scope="module")
def model():
    return make_model(ONE)


@pytest.fixture(scope="module")
def state(model):
    return make_state(model)


@pytest.mark.slow_cases("every_mixer")
@pytest.mark.by_default("documents", *CHUNK_RULES)
@pytest.mark.parametrize(
    ("config", "documents"),
    [(EVERY, False), (ONE, True), *((with_rule(name), False) for name in CHUNK_RULES)],
    ids=["every_mixer", "documents", *CHUNK_RULES],
)
def test_every_mixers_and_memorys_state_comes_back_bit_for_bit(config, documents, tmp_path):
    model = make_model(config)
    state = make_state(model, documents=documents)
    memories.save(tmp_path, "alice", state, model=model)
    loaded = memories.load(tmp_path, "alice", model)
    assert_same(loaded, state)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(loaded) if x.size]
    assert len(set(pointers)) == len(pointers), "each can be donated"


def test_a_fork_costs_what_differs(model, state, tmp_path):
    memories.save(tmp_path, "alice", state, model=model, origin="a test")
    memories.fork(tmp_path, "alice", "bob")
    memories.fork(tmp_path, "bob", "carol")  # Of a fork that changed nothing: the same base.
    tables = memories.describe(tmp_path, "alice")
    assert tables.rows["stream/memory/layer_0/values"] == (144, 144)
    assert all(own == 0 for own, _ in memories.describe(tmp_path, "bob").rows.values())
    bob, alice, dave = change(state, 3, 70), change(state, 5, value=2), change(state, 3, 70, 9)
    memories.save(tmp_path, "bob", bob, model=model)
    memories.save(tmp_path, "alice", alice, model=model)
    memories.fork(tmp_path, "bob", "dave")  # Of a fork that changed something: a chain.
    memories.save(tmp_path, "dave", dave, model=model)
    assert memories.names(tmp_path) == ("alice", "bob", "carol", "dave")
    for name, expected in {"alice": alice, "bob": bob, "carol": state, "dave": dave}.items():
        assert_same(memories.load(tmp_path, name, model), expected)
    described = {name: memories.describe(tmp_path, name) for name in memories.names(tmp_path)}
    assert described["bob"].rows["stream/memory/layer_0/values"] == (2, 144)
    assert described["dave"].rows["stream/memory/layer_0/values"] == (1, 144)
    assert sum(own for own, _ in described["bob"].rows.values()) == 2
    assert [described[name].base for name in described] == [None, "alice", "bob", "bob"]
    assert described["alice"].forks == ("bob",)
    assert described["bob"].forks == ("carol", "dave")
    assert described["alice"].origin == ""
    assert described["bob"].num_read == tuple(state.num_read)
    # A save whose table changed everywhere stores it whole.
    memories.save(tmp_path, "carol", change(state, *range(144)), model=model)
    assert memories.describe(tmp_path, "carol").rows["stream/memory/layer_0/values"] == (144, 144)


def test_an_overlay_is_saved_as_a_fork_of_its_base(model, state, tmp_path):
    memories.save(tmp_path, "base", state, model=model)
    memories.fork(tmp_path, "base", "alice")
    written = change(state, 3, 70)
    base, private = jax.tree.map(jnp.asarray, (state.stream.memory, written.stream.memory))
    overlay = to_overlay(model, private, base, capacity=4)
    over = written._replace(stream=written.stream._replace(memory=overlay))
    memories.save(tmp_path, "alice", over, model=model)
    assert memories.describe(tmp_path, "alice").rows["stream/memory/layer_0/values"] == (2, 144)
    loaded = memories.load(tmp_path, "alice", model)
    assert_same(loaded, written)
    assert_same(to_overlay(model, loaded.stream.memory, base, capacity=4), overlay)


def test_a_memory_goes_back_to_a_saved_point_and_a_needed_base_stays(model, state, tmp_path):
    later = change(state, 7)
    memories.save(tmp_path, "alice", state, model=model)
    memories.fork(tmp_path, "alice", "alice@monday")
    memories.save(tmp_path, "alice", later, model=model)
    memories.restore(tmp_path, "alice", "alice@monday")
    assert_same(memories.load(tmp_path, "alice", model), state)
    with pytest.raises(ValueError, match=r"exists in .*; delete it first"):
        memories.fork(tmp_path, "alice", "alice@monday")
    with pytest.raises(ValueError, match="name a fork of it"):
        memories.restore(tmp_path, "alice", "alice")
    with pytest.raises(ValueError, match="'alice@monday' is the base of alice, which share"):
        memories.delete(tmp_path, "alice@monday")
    memories.delete(tmp_path, "alice@monday", keep_forks=True)
    assert_same(memories.load(tmp_path, "alice", model), state)
    assert len(list((tmp_path / "bases").glob("*.safetensors"))) == 1
    memories.delete(tmp_path, "alice")
    assert [path.name for path in tmp_path.rglob("*")] == ["bases"]
    for call in (memories.delete, memories.describe):
        with pytest.raises(FileNotFoundError, match=r"no memory 'alice' in .*, which holds none\."):
            call(tmp_path, "alice")


def test_a_memory_without_caches_starts_at_position_0_with_its_waiting_tokens(model, tmp_path):
    state = make_state(model, batch=2, groups=2)
    memories.save(tmp_path, "alice", state, model=model, keep="memory")
    with pytest.raises(ValueError, match=r"saved without caches .*; pass max_length"):
        memories.load(tmp_path, "alice", model)
    loaded = memories.load(tmp_path, "alice", model, max_length=16)
    assert_same(loaded.stream.memory, state.stream.memory)
    assert_same(loaded.stream.layers["layer_0"].pending, state.stream.layers["layer_0"].pending)
    assert_same(loaded.num_drawn, state.num_drawn)
    cache = loaded.stream.layers["layer_0"].cache
    assert cache.keys.shape[1] == 16
    assert np.all(cache.positions == -1)
    assert not np.any(loaded.num_read)
    assert not np.any(loaded.logits)
    with pytest.raises(ValueError, match=r"keep='memry' is none of \['all', 'memory'\]"):
        memories.save(tmp_path, "alice", state, model=model, keep="memry")  # pyright: ignore


def test_files_of_others_are_refused_by_name(model, state, tmp_path):
    memories.save(tmp_path, "alice", state, model=model, origin="runs/a, step 7")
    other = make_model(ONE, seed=9)
    window = make_model(dataclasses.replace(ONE, norm_eps=1e-3))
    weights = r"alice.safetensors belongs to other weights, of runs/a, step 7; use those"

    def save(folder, name, model):
        memories.save(folder, name, state, model=model)

    for refused in (memories.load, save):
        with pytest.raises(ValueError, match=weights):
            refused(tmp_path, "alice", other)
        with pytest.raises(ValueError, match=r"another model, of runs/a, step 7: norm_eps: "):
            refused(tmp_path, "alice", window)
    (tmp_path / "dave.safetensors").mkdir()
    assert memories.names(tmp_path) == ("alice",)
    with pytest.raises(ValueError, match=r"dave.safetensors is no file; remove it"):
        memories.load(tmp_path, "dave", model)


def test_what_cannot_be_saved_leaves_what_was_there(model, state, tmp_path, monkeypatch):
    memories.save(tmp_path, "alice", state, model=model)
    with pytest.raises(
        ValueError, match=r"'alice' is not saved, because .*layer_0/values holds NaN"
    ):
        memories.save(tmp_path, "alice", change(state, 1, value=np.nan), model=model)
    for name in ("", ".alice", "a/b", "..", "a" * 101, "ä"):
        with pytest.raises(ValueError, match="must be 1 to 100 ASCII letters"):
            memories.save(tmp_path, name, state, model=model)

    def full(open_file, arrays, metadata):
        open_file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file, "write_tensors", full)
    with pytest.raises(OSError, match=r"No space left on device\).*unchanged.*alice.safetensors"):
        memories.save(tmp_path, "alice", change(state, 1), model=model)
    assert_same(memories.load(tmp_path, "alice", model), state)
    assert not list(tmp_path.glob("*.tmp"))


class Killed(BaseException):
    """Ends a program where it stands, as a kill does: nothing is tidied up."""


@pytest.mark.parametrize("moment", range(11))
def test_a_save_or_fork_that_is_killed_anywhere_loses_nothing(
    model, state, tmp_path, monkeypatch, moment
):
    """Seen with real processes in `tests/faults/test_memories.py`."""
    after = change(state, 1)
    memories.save(tmp_path, "alice", state, model=model)
    steps = iter(range(moment, -1, -1))

    def killed(function):
        def call(*arguments, **options):
            if not next(steps, -1):
                raise Killed
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(file, "write_tensors", killed(file.write_tensors))
        for name in ("fsync", "link", "replace"):
            patch.setattr(os, name, killed(getattr(os, name)))
        memories.fork(tmp_path, "alice", "bob")
        memories.save(tmp_path, "bob", after, model=model)
    assert_same(memories.load(tmp_path, "alice", model), state)
    if "bob" in memories.names(tmp_path):
        table = memories.load(tmp_path, "bob", model).stream.memory["layer_0"].values
        assert any(np.array_equal(table, x.stream.memory["layer_0"].values) for x in (state, after))
    else:
        memories.fork(tmp_path, "alice", "bob")
    memories.save(tmp_path, "bob", after, model=model)
    assert_same(memories.load(tmp_path, "bob", model), after)
    memories.delete(tmp_path, "bob")
    memories.delete(tmp_path, "alice")
    assert [path.name for path in tmp_path.rglob("*")] == ["bases"]


def test_of_two_that_save_one_name_one_is_refused(model, state, tmp_path):
    with memories.hold(tmp_path, "alice"):
        memories.save(tmp_path, "alice", state, model=model)  # The holder itself may.
        refused = []

        def elsewhere():
            try:
                memories.save(tmp_path, "alice", state, model=model)
            except RunInUseError as error:
                refused.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert "The memory 'alice' in" in refused[0]
    assert "is in use by process" in refused[0]
    memories.save(tmp_path, "alice", state, model=model)


def test_rows_are_put_together_to_the_bit():
    rng = np.random.default_rng(0)
    base = rng.normal(size=(2, 30, 5)).astype(np.float32)
    new = base.copy()
    base[0, 1], new[0, 1] = 0.0, -0.0
    base[0, 2, 0] = new[0, 2, 0] = np.nan
    new[1, 7, 3] += 1
    stored = rows.stored("x", new, base)
    assert stored.part == "rows"
    assert stored.rows == 2
    base.flags.writeable = False
    back = rows.put_together("x", "rows", stored.arrays, base)
    assert back.tobytes() == new.tobytes()
    assert base[1, 7, 3] != new[1, 7, 3]
    assert rows.put_together("x", "rows", stored.arrays, base.copy()).tobytes() == new.tobytes()
    assert rows.stored("x", base, base).part == "same"
    assert rows.stored("x", new, base[:1]).part == rows.stored("x", new, None).part == "whole"
    for empty in (np.zeros((0, 3)), np.zeros(())):
        part = rows.stored("x", empty, empty)
        assert rows.put_together("x", part.part, part.arrays, empty).shape == empty.shape
