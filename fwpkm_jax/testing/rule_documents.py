"""The contract of chunk rules on rows of several documents, whole and as streams."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from fwpkm_jax.core.streams import streaming
from fwpkm_jax.core.streams.pending import NewDocuments, Signals, init_pending
from fwpkm_jax.core.targets import write_weights
from fwpkm_jax.layers.memories.documents import run_documents
from fwpkm_jax.rules.base import AbstractChunkRule
from fwpkm_jax.testing.documents import (
    Documents,
    apart,
    places_apart,
    random_documents,
    starts_of,
    together,
)
from fwpkm_jax.testing.properties import Property, cast_floats, require, require_near
from fwpkm_jax.testing.rule_case import CHUNK, RuleCase, sample_signals

_ROWS, _LENGTH, _MOST = 2, 14, 5
"""Rows, their tokens, and most documents of a row; padding between them counts as one."""
_TRIALS, _PIECE = 4, 5
_EXACT, _SINGLE = 1e-12, 1e-6  # Of the norm, in double and in single precision.


class _Results(NamedTuple):
    """What documents of rows give; arrays of tokens are 0 at padding.

    Attributes:
      output: `[rows, length, value]`.
      memory: after each row's last document, leaves `[rows, ...]`.
      memory_gradient: with respect to the memory that documents start from, leaves `[rows, ...]`.
      gradients: with respect to query, value and gate, leaves `[rows, length, ...]`.
    """

    output: Any
    memory: Any
    memory_gradient: Any
    gradients: Any


def packed_documents_equal_separate_rows(case: RuleCase) -> None:
    """Checks outputs, final memories and all gradients of documents that each start anew.

    Boundaries are random; some documents have one token, some begin or end with a chunk, and some
    have padding between them. The difference is at most 1e-12 of the norm.
    """
    _compare_rows(case, np.float64, _EXACT)


def packed_documents_equal_separate_rows_in_single_precision(case: RuleCase) -> None:
    """Checks the same in float32: at most 1e-6 of the norm."""
    _compare_rows(case, np.float32, _SINGLE)


def streamed_documents_equal_separate_streams(case: RuleCase) -> None:
    """Checks outputs, memory and waiting tokens of a stream in which documents start anew.

    Pieces cut documents anywhere, so that a document may be longer than a piece.
    """
    rule = cast(AbstractChunkRule, case.rule)

    @jax.jit
    def push(memory: Any, pending: Any, piece: Signals, documents: Any, count: Any) -> Any:
        return streaming.push(
            *(rule, memory, pending, piece),
            chunk_size=CHUNK,
            num_real=count,
            documents=documents,
        )

    def stream(signals: Signals, starts: np.ndarray, sizes: list[np.ndarray]) -> Any:
        """Outputs `[rows, length, value]`, memories and queues; pieces of different sizes."""
        number = len(starts)
        initial = _stacked(case.memory, number)
        pending = init_pending(
            jax.tree.map(lambda x: jnp.asarray(x)[:, None], signals), CHUNK + rule.lookahead
        )
        memory, done = jax.tree.map(lambda x: 0 * x, initial), np.zeros(number, int)
        output = np.zeros((number, _LENGTH, rule.value_dim))
        for size in sizes:
            at = np.minimum(done[:, None] + np.arange(_PIECE), _LENGTH - 1)
            real = np.arange(_PIECE) < size[:, None]
            piece = jax.tree.map(lambda x, at=at: _rows(x, at)[:, None], signals)
            documents = NewDocuments(jnp.asarray(_rows(starts, at) & real), initial)
            out = push(memory, pending, piece, documents, size.astype(np.int32))
            memory, pending = out.memory, out.pending
            for row in range(number):
                read = np.asarray(out.output)[row, 0, : size[row]]
                output[row, done[row] : done[row] + size[row]] = read
            done += size
        return output, memory, pending

    rng = np.random.default_rng(6)
    for trial in range(_TRIALS):
        rows = [_random_documents(rng, trial, padding=False) for _ in range(_ROWS)]
        signals, places = _signals(rule, trial, np.float64), _apart_places(rows)
        found, *state = stream(signals, starts_of(rows, _LENGTH), _random_sizes(rng))
        lengths = np.sum(places >= 0, axis=1)
        begun = np.zeros(places.shape, bool)
        begun[:, 0] = lengths > 0
        sizes = [np.clip(lengths - first, 0, _PIECE) for first in range(0, _LENGTH, _PIECE)]
        separate = jax.tree.map(lambda x, at=places: apart(x, at), signals)
        expected, *after = stream(separate, begun, sizes)
        where = f"of documents {rows}"
        outputs = found, together(expected, places, _ROWS)
        require_near(*outputs, what=f"the output {where}", tolerance=_EXACT)
        after = _of_last(after, rows)
        require_near(state, after, what=f"memory and queue {where}", tolerance=_EXACT)


def _compare_rows(case: RuleCase, dtype: Any, tolerance: float) -> None:
    rule = cast(AbstractChunkRule, case.rule)
    memory = cast_floats(case.memory, dtype)
    rng = np.random.default_rng(5)
    packed, alone = _passes(rule)
    reached = np.zeros(3, bool)
    for trial in range(_TRIALS):
        rows = [_random_documents(rng, trial, padding=True) for _ in range(_ROWS)]
        signals = _signals(rule, trial, dtype)
        places = _apart_places(rows)
        mask = together((places >= 0).astype(dtype), places, _ROWS)
        c = rng.normal(size=(_ROWS, _LENGTH, rule.value_dim)).astype(dtype) * mask[..., None]
        c_memory = jax.tree.map(lambda x: rng.normal(size=(_ROWS, *x.shape)).astype(dtype), memory)
        arrays = signals._replace(mask=mask)
        starts = starts_of(rows, _LENGTH, padding=True)
        found = packed(_stacked(memory, _ROWS), arrays, starts, c, c_memory)
        # What is read at padding does not matter.
        shown = lambda x, at=places: together(apart(x, at), at, _ROWS)  # noqa: E731
        gradients = jax.tree.map(shown, found.gradients)
        found = found._replace(output=shown(found.output), gradients=gradients)
        expected = _apart(alone, memory, arrays, rows, c, c_memory)
        for ours, theirs, name in zip(
            found, expected, ("output", "memory", "gradient of the memory", "gradient"), strict=True
        ):
            what = f"the {name} of documents {rows} "
            require_near(ours, theirs, what=what, tolerance=tolerance)
        reached |= np.array([np.any(x != 0) for x in found.gradients])
    require(reached.all(), "a gradient of query, value or gate is 0 everywhere")


def _passes(rule: AbstractChunkRule) -> tuple[Any, Any]:
    """Packed rows, and one document in each row; with gradients of a weighted sum."""

    def packed(memory: Any, signals: Signals, starts: Any) -> Any:
        mask = signals.mask
        out = run_documents(
            rule, memory, signals, starts, mask, chunk_size=CHUNK, pairing=write_weights
        )
        return out.read, out.memory

    def alone(memory: Any, signals: Signals) -> Any:
        query, value, gate, mask = signals
        sequence = rule.sequence(query, value, gate=gate, mask=mask, chunk_size=CHUNK)
        one = jax.tree.map(lambda x: x[:, None], sequence)
        out = rule.run_groups(memory, one, chunk_size=CHUNK)
        return out.output[:, 0], out.memory

    def with_gradients(run: Any) -> Any:
        @jax.jit
        def both(memory: Any, signals: Signals, *rest: Any) -> _Results:
            *options, c, c_memory = rest

            def of(memory: Any, query: Any, value: Any, gate: Any) -> Any:
                return run(memory, signals._replace(query=query, value=value, gate=gate), *options)

            (output, after), pull = jax.vjp(of, memory, *signals[:3])
            d_memory, *gradients = pull((c.astype(output.dtype), c_memory))
            return _Results(output, after, d_memory, tuple(gradients))

        return both

    return with_gradients(packed), with_gradients(alone)


def _apart(alone: Any, memory: Any, signals: Signals, rows: Any, c: Any, c_memory: Any) -> _Results:
    """The results of each document in a row of its own, moved back to its place."""
    places = _apart_places(rows)

    def of_last(x: Any) -> np.ndarray:
        whole = np.zeros((len(places), *x.shape[1:]), x.dtype)
        whole[_last(rows)] = x
        return whole

    def by_row(x: Any) -> np.ndarray:
        return np.asarray(x).reshape(_ROWS, _MOST, *x.shape[1:]).sum(axis=1)

    separate = jax.tree.map(lambda x: apart(x, places), signals)
    out = alone(
        _stacked(memory, len(places)), separate, apart(c, places), jax.tree.map(of_last, c_memory)
    )
    return _Results(
        together(out.output, places, _ROWS),
        _of_last(out.memory, rows),
        jax.tree.map(by_row, out.memory_gradient),
        jax.tree.map(lambda x: together(x, places, _ROWS), out.gradients),
    )


def _apart_places(rows: Documents) -> np.ndarray:
    return places_apart(rows, _LENGTH, most=_MOST)


def _last(rows: Documents) -> list[int]:
    """Where each row's last document is among the separate ones."""
    return [row * _MOST + len(documents) - 1 for row, documents in enumerate(rows)]


def _of_last(tree: Any, rows: Documents) -> Any:
    return jax.tree.map(lambda x: np.asarray(x)[_last(rows)], tree)


def _random_documents(
    rng: np.random.Generator, trial: int, *, padding: bool
) -> list[tuple[int, int]]:
    """First tokens and ends of a row's documents, in order; some have one token."""
    if trial == 0:  # The second document ends with a chunk of its own, the third begins there.
        return [(0, 1), (1, 1 + CHUNK), (1 + CHUNK, _LENGTH)]
    found = random_documents(rng, _LENGTH, number=(_MOST, _MOST, 2)[(trial - 1) % 3])
    return found[::2] if padding and trial % 2 else found  # Every second one becomes padding.


def _random_sizes(rng: np.random.Generator) -> list[np.ndarray]:
    """How many tokens of each row the pieces of a stream have, at most `_PIECE`."""
    sizes, done = [], np.zeros(_ROWS, int)
    while np.any(done < _LENGTH):
        size = np.minimum(rng.integers(0, _PIECE + 1, size=_ROWS), _LENGTH - done)
        sizes.append(size)
        done = done + size
    return sizes


def _signals(rule: AbstractChunkRule, seed: int, dtype: Any) -> Signals:
    signals = sample_signals(rule, batch=_ROWS, length=_LENGTH, seed=seed)
    return jax.tree.map(lambda x: np.asarray(x, dtype), signals)


def _rows(x: Any, at: np.ndarray) -> np.ndarray:
    """Each row's tokens at these places."""
    return np.stack([np.asarray(x)[row, at[row]] for row in range(len(at))])


def _stacked(memory: Any, number: int) -> Any:
    return jax.tree.map(lambda x: jnp.stack([x] * number), memory)


DOCUMENT_PROPERTIES: dict[str, Property] = {
    check.__name__: check
    for check in (
        packed_documents_equal_separate_rows,
        packed_documents_equal_separate_rows_in_single_precision,
        streamed_documents_equal_separate_streams,
    )
}
"""Properties of every `AbstractChunkRule` on documents, in addition to the others, by name."""
