"""Every planted fault of a program fails its line; programs that are only unusual pass."""

from dataclasses import replace

import numpy as np
import pytest

from fwpkm_jax.audit import apart, causality, program_lines
from fwpkm_jax.audit.design import ROUNDING, antichain, boundaries
from fwpkm_jax.audit.stability import long_text
from tests.audit.toy import DIM, VOCAB, Toy

ROWS, LENGTH = 6, 60


def places(x, state):
    """The positions of a piece, `[1, piece, 1]`."""
    return state.position + np.arange(x.shape[1])[None, :, None]


def ahead(*, by=1, where=lambda place: place >= 0, rows=slice(None), size=0.3):
    """Inputs see those `by` tokens later, at some places of some rows."""

    def fault(toy, x, state):
        later = np.pad(x[:, by:], ((0, 0), (0, min(by, x.shape[1])), (0, 0)))
        found = x.copy()
        found[rows] += size * (later * where(places(x, state)))[rows]
        return found

    return fault


def between(source, reader, *, where=lambda place: place >= 0, size=0.3):
    """One row sees another one's inputs, at some places."""

    def fault(toy, x, state):
        found = x.copy()
        if len(x) > max(source, reader):
            found[reader] += size * (x[source] * where(places(x, state))[0])
        return found

    return fault


def statistics(toy, x, state):
    return x - 0.3 * x.mean(0, keepdims=True)


def noise(size, then=lambda toy, x, state: x):
    """Another random number in every call, of the inputs' size times `size`."""

    def fault(toy, x, state):
        return then(toy, x, state) + size * toy.noise.normal(size=x.shape)

    return fault


def last_call(toy, x, state):
    """Each call leaves something for the next one, whoever reads it."""
    kept = toy.log[-1] if toy.log else 0.0
    toy.log.append(float(x.mean()))
    return x + 0.3 * kept


class WritesAlways(Toy):
    def read(self, state, tokens, *, write):
        return super().read(state, tokens, write=True)


class KeepsTheQueue(Toy):
    def restart(self, state):
        return replace(super().restart(state), window=state.window)


class OneMemoryForAll(Toy):
    def read(self, state, tokens, *, write):
        logits, after = super().read(state, tokens, write=write)
        return logits, replace(
            after, memory=np.broadcast_to(after.memory.mean(0), (len(tokens), DIM))
        )


class ChangesItsState(Toy):
    """The state that it is given is changed in place, as by a buffer that is used again."""

    def read(self, state, tokens, *, write):
        logits, after = super().read(state, tokens, write=write)
        state.memory[:] = after.memory
        return logits, after


class ForgetsNoPiece(Toy):
    """A piece is read as if it began a text."""

    def read(self, state, tokens, *, write):
        empty = np.zeros_like(state.window)
        return super().read(replace(state, window=empty), tokens, write=write)


PLANTS = {
    "sees one token ahead": (ahead(), "causality, stream at once"),
    "sees ahead at the last token but one alone": (
        *(ahead(where=lambda place: place == LENGTH - 2), "causality, stream at once"),
    ),
    "sees ahead at one early place alone": (
        *(ahead(where=lambda place: place == 3), "causality, stream at once"),
    ),
    "sees ahead at every 13th place": (
        *(ahead(where=lambda place: place % 13 == 5), "causality, stream at once"),
    ),
    "sees 40 tokens ahead": (ahead(by=40), "causality, stream at once"),
    "sees ahead by a millionth": (ahead(size=1e-6), "causality, stream at once"),
    "sees ahead in one row alone": (ahead(rows=slice(4, 5)), "causality, stream at once"),
    "sees ahead in pieces alone": (
        lambda toy, x, state: ahead()(toy, x, state) if 1 < x.shape[1] < LENGTH else x,
        "causality, stream in pieces",
    ),
    "sees ahead in a batch of one alone": (
        lambda toy, x, state: ahead()(toy, x, state) if len(x) == 1 else x,
        "causality, one row alone",
    ),
    "sees ahead under rounding": (noise(1e-8, ahead(size=1e-3)), "causality, stream at once"),
    "noise that hides what it sees": (noise(0.3, ahead()), "causality, stream at once"),
    "noise of a thousandth": (noise(1e-3), "isolation, stream in pieces"),
    "leaves something for the next call": (last_call, "causality, token by token"),
    "the first row sees the last": (between(ROWS - 1, 0), "isolation, stream at once"),
    "the last row sees the first at one late place": (
        *(between(0, ROWS - 1, where=lambda place: place == 57), "isolation, token by token"),
    ),
    "a row sees its neighbour at every 13th place": (
        *(between(2, 3, where=lambda place: place % 13 == 5), "isolation, stream in pieces"),
    ),
    "a row sees another one under rounding": (
        *(noise(1e-8, between(4, 1, size=1e-3)), "isolation, stream at once"),
    ),
    "statistics over the rows": (statistics, "isolation, token by token"),
    "reads nothing": (lambda toy, x, state: 0 * x, "causality, stream at once"),
    "one memory for all": (OneMemoryForAll, "isolation, stream at once"),
    "writes what is asked aside": (WritesAlways, "isolation, question aside"),
    "changes the state that it is given": (ChangesItsState, "isolation, question aside"),
    "a restart that keeps a cache": (KeepsTheQueue, "isolation, emptied caches"),
    "a cache that ends with its piece": (ForgetsNoPiece, "causality, ways of reading agree"),
}


def lines_of(program, **options):
    tokens = np.random.default_rng(5).integers(VOCAB, size=(ROWS, LENGTH)).astype(np.int32)
    return program_lines(program, tokens, chunk_sizes=[8], **options)


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_fails_its_line(name):
    fault, line = PLANTS[name]
    program = fault() if isinstance(fault, type) else Toy(fault)
    failed = {f"{one.section}, {one.name}" for one in lines_of(program) if one.verdict == "fail"}
    assert line in failed, failed


SOUND = {
    "a memory in chunks": Toy,
    "no memory": lambda: Toy(keeps=False),
    "chunks of one token": lambda: Toy(chunk=1),
    "a chunk longer than the text": lambda: Toy(chunk=1000),
    "sums in no fixed order": lambda: Toy(noise(1e-8)),
    "few bits": lambda: Toy(lambda toy, x, state: x.astype(np.float16).astype(float)),
    "positions in the input": lambda: Toy(lambda toy, x, state: x + np.sin(places(x, state))),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_program_passes_every_line(name):
    assert {line.text for line in lines_of(SOUND[name]()) if line.verdict != "pass"} == set()


@pytest.mark.parametrize(
    ("size", "exact", "fails"), [(1e-7, True, True), (1e-7, False, False), (1e-3, False, True)]
)
def test_rounding_with_the_rows_beside_passes_only_where_it_is_said(size, exact, fails):
    program = Toy(between(0, 1, size=size))
    failed = {
        f"{one.section}, {one.name}"
        for one in lines_of(program, exact=exact)
        if one.verdict == "fail"
    }
    assert ("isolation, stream at once" in failed) is fails
    assert bool(failed) is fails


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 35, 96])
def test_for_every_ordered_pair_some_call_changes_the_first_alone(count):
    calls = antichain(count)
    alone = calls.T.astype(int) @ (1 - calls.astype(int))  # [first, second]
    assert ((alone > 0) | np.eye(count, dtype=bool)).all()
    assert calls.any(0).all()
    assert len(calls) <= 10


@pytest.mark.parametrize("source", range(ROWS))
def test_a_leak_from_any_row_to_any_other_one_is_found(source):
    tokens = np.random.default_rng(5).integers(VOCAB, size=(ROWS, LENGTH))
    for reader in range(ROWS):
        toy = Toy(between(source, reader, where=lambda place: place == 31))

        def path(tokens, toy=toy):
            return toy.read(toy.start(*tokens.shape), tokens, write=True)[0]

        line = apart("rows", path, tokens, vocab_size=VOCAB)
        leaks = [] if source == reader else [reader]
        assert line.numbers["leaks_to"] == leaks
        assert line.verdict == ("fail" if leaks else "pass")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (between(0, ROWS - 1), "Rows see each other: another text in other rows moves logits by "),
        (statistics, "Rows see each other: another text in other rows moves logits by "),
        (ahead(rows=slice(4, 5)), "Another text from token "),
    ],
)
def test_a_look_at_other_rows_is_told_from_one_at_later_tokens(fault, reason):
    tokens = np.random.default_rng(5).integers(VOCAB, size=(ROWS, LENGTH))
    toy = Toy(fault)

    def path(tokens):
        return toy.read(toy.start(*tokens.shape), tokens, write=True)[0]

    line = causality("rows", path, tokens, range(1, 30), vocab_size=VOCAB, rows_apart=True)
    assert line.verdict == "fail"
    assert line.text.startswith(reason)


def test_a_model_that_diverges_is_not_said_to_be_unread():
    def path(tokens):
        return np.where(np.arange(8)[:, None] < 5, np.eye(4)[tokens], np.nan)

    line = causality("whole", path, np.zeros((2, 8), int), [3, 6], vocab_size=4)
    assert line.verdict == "fail"
    assert line.text.startswith("24 numbers are NaN, which no other text moves: the model diverges")


def test_padding_that_is_read_is_named():
    owners = np.where(np.arange(8) < 3, -1, np.arange(2)[:, None])

    def path(tokens):
        return np.eye(4)[tokens] + tokens[:, :1, None]

    line = apart("padded", path, np.zeros((2, 8), int), vocab_size=4, owners=owners)
    assert line.verdict == "fail"
    assert line.numbers["leaks_to"] == [0, 1]
    assert line.text.startswith("What others read changes user ")


@pytest.mark.parametrize(("bounds", "exact", "verdict"), [
    (0.5, True, "fail"), (3, False, "pass"), (30, False, "fail"),
])  # fmt: skip
def test_rounding_with_what_is_read_beside_passes_for_experts_alone(bounds, exact, verdict):
    def path(tokens):
        beside = np.resize(tokens[::-1, :1, None] > 0, (2, 8, 1))
        return np.eye(4)[tokens] + bounds * ROUNDING * np.std(np.eye(4)) * beside

    line = apart("rows", path, np.zeros((2, 8), int), vocab_size=4, exact=exact)
    assert line.verdict == verdict


def test_what_is_not_looked_at_is_told():
    def path(tokens):
        return np.eye(4)[tokens]

    tokens = np.zeros((1, 300), int)
    few = boundaries(300, [64], most=16)
    line = causality("long", path, tokens, few, vocab_size=4)
    assert line.verdict == "pass"
    widest = max(np.diff([0, *few, 300])) - 1
    assert (
        f"{len(few)} of 299 positions (a look over up to {widest} tokens could hide)" in line.text
    )
    whole = causality("long", path, tokens, boundaries(300, [64], most=299), vocab_size=4)
    assert "each of 299 of 299 positions on moves nothing before it, bit for bit" in whole.text


def test_boundaries_hold_the_edges_of_chunks_the_ends_and_late_places():
    found = boundaries(2000, [256], most=64)
    assert len(found) <= 64
    assert {1, 1999, 255, 256, 257, 1791, 1792, 1793} <= set(found)
    assert max(np.diff(found)) < 100


@pytest.mark.parametrize(("start", "verdict"), [(700, "fail"), (5000, "pass")])
def test_a_look_ahead_that_begins_late_in_a_long_text_is_named(start, verdict):
    text = np.random.default_rng(5).integers(VOCAB, size=1600)
    finite, late = long_text(Toy(noise(1e-9, ahead(where=lambda place: place >= start))), text)
    assert (finite.name, finite.verdict) == ("a long text", "pass")
    assert (late.section, late.name, late.verdict) == ("causality", "late in a long text", verdict)
    if verdict == "pass":
        assert "Another text from each of 8 tokens on, the last of them token 1,535," in late.text


def test_a_text_whose_losses_are_not_finite_fails_from_its_first_piece_on():
    def fault(toy, x, state):
        return np.where(places(x, state) >= 600, np.nan, x)

    finite, _ = long_text(Toy(fault), np.zeros(1600, int))
    assert finite.verdict == "fail"
    assert finite.text == "Not finite from token 512 on."
