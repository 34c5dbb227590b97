"""The contract of chunk rules on rows of several documents, whole and as streams."""

import itertools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from fwpkm_jax.core.streams import streaming
from fwpkm_jax.core.streams.pending import NewDocuments, Signals, init_pending
from fwpkm_jax.core.targets import write_weights
from fwpkm_jax.layers.memories.documents import run_documents
from fwpkm_jax.rules.base import AbstractChunkRule
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
    initial = _stacked(case.memory)

    @jax.jit
    def push(memory: Any, pending: Any, piece: Signals, starts: Any, count: Any) -> Any:
        return streaming.push(
            *(rule, memory, pending, piece),
            chunk_size=CHUNK,
            num_real=count,
            documents=NewDocuments(starts, initial),
        )

    def stream(signals: Signals, starts: np.ndarray, sizes: list[np.ndarray]) -> Any:
        """Outputs `[rows, length, value]`, memories and queues; pieces of different sizes."""
        one = jax.tree.map(lambda x: jnp.asarray(x)[:, None], signals)
        memory, done = jax.tree.map(lambda x: 0 * x, initial), np.zeros(_ROWS, int)
        pending = init_pending(one, CHUNK + rule.lookahead)
        output = np.zeros((_ROWS, _LENGTH, rule.value_dim))
        for size in sizes:
            at = np.minimum(done[:, None] + np.arange(_PIECE), _LENGTH - 1)
            real = np.arange(_PIECE) < size[:, None]
            piece = jax.tree.map(lambda x, at=at: _rows(x, at)[:, None], signals)
            out = push(memory, pending, piece, _rows(starts, at) & real, size.astype(np.int32))
            memory, pending = out.memory, out.pending
            for row in range(_ROWS):
                read = np.asarray(out.output)[row, 0, : size[row]]
                output[row, done[row] : done[row] + size[row]] = read
            done += size
        return output, memory, pending

    rng = np.random.default_rng(6)
    for trial in range(_TRIALS):
        rows = [_random_documents(rng, trial, padding=False) for _ in range(_ROWS)]
        signals = _signals(rule, trial, np.float64)
        starts = _starts(rows)
        found, *state = stream(signals, starts, _random_sizes(rng))
        after: list[Any] = []
        for number in range(_MOST):
            # The documents of this number, each moved to the beginning of its row.
            own = [row[min(number, len(row) - 1)] for row in rows]
            at = np.stack([np.minimum(np.arange(_LENGTH) + first, _LENGTH - 1) for first, _ in own])
            begun = np.zeros((_ROWS, _LENGTH), bool)
            begun[:, 0] = True
            length = np.array([end - first for first, end in own])
            alone = jax.tree.map(lambda x, at=at: _rows(x, at), signals)
            sizes = [np.clip(length - start, 0, _PIECE) for start in range(0, _LENGTH, _PIECE)]
            expected, *after = stream(alone, begun, sizes)
            for row, (first, end) in enumerate(own):
                where = f"of documents {rows}, document {number} of row {row}"
                require_near(
                    *(found[row, first:end], expected[row, : end - first]),
                    what=f"the output {where}",
                    tolerance=_EXACT,
                )
        where = f"of documents {rows}"
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
        mask = np.zeros((_ROWS, _LENGTH), dtype)
        for row, documents in enumerate(rows):
            for first, end in documents:
                mask[row, first:end] = 1
        c = rng.normal(size=(_ROWS, _LENGTH, rule.value_dim)).astype(dtype) * mask[..., None]
        c_memory = jax.tree.map(lambda x: rng.normal(size=(_ROWS, *x.shape)).astype(dtype), memory)
        arrays = signals._replace(mask=mask)
        found = packed(_stacked(memory), arrays, _starts(rows, padding=True), c, c_memory)
        found = _on_tokens(found, mask)
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
    places = np.full((_ROWS * _MOST, _LENGTH), -1)
    last = np.zeros(_ROWS, int)
    for row, documents in enumerate(rows):
        for number, (first, end) in enumerate(documents):
            last[row] = row * _MOST + number
            places[last[row], : end - first] = row * _LENGTH + np.arange(first, end)
    used = places >= 0

    def apart(x: Any) -> np.ndarray:
        moved = np.asarray(x).reshape(_ROWS * _LENGTH, *x.shape[2:])[places]
        return np.where(used.reshape(*used.shape, *[1] * (moved.ndim - 2)), moved, 0)

    def back(x: Any) -> np.ndarray:
        whole = np.zeros((_ROWS * _LENGTH, *x.shape[2:]), x.dtype)
        whole[places[used]] = np.asarray(x)[used]
        return whole.reshape(_ROWS, _LENGTH, *x.shape[2:])

    def of_last(x: Any) -> np.ndarray:
        whole = np.zeros((_ROWS * _MOST, *x.shape[1:]), x.dtype)
        whole[last] = x
        return whole

    separate = jax.tree.map(apart, signals)
    repeated = jax.tree.map(lambda x: jnp.repeat(x[None], _ROWS * _MOST, axis=0), memory)
    out = alone(repeated, separate, apart(c), jax.tree.map(of_last, c_memory))
    by_row = lambda x: np.asarray(x).reshape(_ROWS, _MOST, *x.shape[1:]).sum(axis=1)  # noqa: E731
    return _Results(
        back(out.output),
        jax.tree.map(lambda x: np.asarray(x)[last], out.memory),
        jax.tree.map(by_row, out.memory_gradient),
        jax.tree.map(back, out.gradients),
    )


def _on_tokens(results: _Results, mask: np.ndarray) -> _Results:
    def shown(x: Any) -> np.ndarray:
        return np.where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)) != 0, np.asarray(x), 0)

    return results._replace(
        output=shown(results.output), gradients=jax.tree.map(shown, results.gradients)
    )


def _random_documents(
    rng: np.random.Generator, trial: int, *, padding: bool
) -> list[tuple[int, int]]:
    """First tokens and ends of a row's documents, in order; some have one token."""
    if trial == 0:  # The second document ends with a chunk of its own, the third begins there.
        bounds = [0, 1, 1 + CHUNK, _LENGTH]
    else:
        number = (_MOST, _MOST, 2)[(trial - 1) % 3]
        inner = rng.choice(np.arange(1, _LENGTH), size=number - 1, replace=False)
        bounds = [0, *sorted(map(int, inner)), _LENGTH]
    found = list(itertools.pairwise(bounds))
    return found[::2] if padding and trial % 2 else found  # Every second one becomes padding.


def _random_sizes(rng: np.random.Generator) -> list[np.ndarray]:
    """How many tokens of each row the pieces of a stream have, at most `_PIECE`."""
    sizes, done = [], np.zeros(_ROWS, int)
    while np.any(done < _LENGTH):
        size = np.minimum(rng.integers(0, _PIECE + 1, size=_ROWS), _LENGTH - done)
        sizes.append(size)
        done = done + size
    return sizes


def _starts(rows: list[list[tuple[int, int]]], *, padding: bool = False) -> np.ndarray:
    """True at first tokens; with `padding` also behind each end, where padding may begin."""
    starts = np.zeros((_ROWS, _LENGTH + 1), bool)
    for row, documents in enumerate(rows):
        for first, end in documents:
            starts[row, first] = True
            starts[row, end] |= padding
    return starts[:, :_LENGTH]


def _signals(rule: AbstractChunkRule, seed: int, dtype: Any) -> Signals:
    signals = sample_signals(rule, batch=_ROWS, length=_LENGTH, seed=seed)
    return jax.tree.map(lambda x: np.asarray(x, dtype), signals)


def _rows(x: Any, at: np.ndarray) -> np.ndarray:
    """Each row's tokens at these places."""
    return np.stack([np.asarray(x)[row, at[row]] for row in range(_ROWS)])


def _stacked(memory: Any) -> Any:
    return jax.tree.map(lambda x: jnp.stack([x] * _ROWS), memory)


DOCUMENT_PROPERTIES: dict[str, Property] = {
    check.__name__: check
    for check in (
        packed_documents_equal_separate_rows,
        packed_documents_equal_separate_rows_in_single_precision,
        streamed_documents_equal_separate_streams,
    )
}
"""Properties of every `AbstractChunkRule` on documents, in addition to the others, by name."""
