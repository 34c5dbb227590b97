"""The additional contract of chunk rules, which define `read` and `write`: streams, long chunks."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fwpkm_jax.core.chunks import Memory
from fwpkm_jax.core.slots.options.blocks import ChunkBlocks
from fwpkm_jax.core.streams import flush as flushing
from fwpkm_jax.core.streams import streaming
from fwpkm_jax.core.streams.pending import Pending, Signals
from fwpkm_jax.core.targets import WriteWeights
from fwpkm_jax.rules.base import AbstractChunkRule
from fwpkm_jax.testing.properties import Property, require, require_close, require_equal
from fwpkm_jax.testing.rule_case import BATCH, RuleCase, sample_signals

_CALLS = ((1, 2), (8, 3))
"""Lengths and chunk sizes of calls: one token, and more than two chunks. They are few, so that each
is compiled once for all cuts. The chunk size changes between the two."""
_CAPACITY = 6
_CUTS = 8  # Random cuts of a stream, half of them with padding.


class _Stream:
    """A rule's compiled functions for streams."""

    def __init__(self, rule: AbstractChunkRule):
        self.rule = rule
        self.read = jax.jit(rule.read)
        self.write, self.step = jax.jit(rule.write), jax.jit(rule.step)
        self._targets = jax.jit(rule.targets)

        @functools.partial(jax.jit, static_argnames="chunk_size")
        def push(memory: Memory, pending: Pending, piece: Signals, *, chunk_size: int) -> Any:
            one = jax.tree.map(lambda x: x[None], (memory, pending, piece))
            out = streaming.push(rule, *one, chunk_size=chunk_size)
            return jax.tree.map(lambda x: x[0], tuple(out))

        @jax.jit
        def flush(memory: Memory, pending: Pending) -> Any:
            one = jax.tree.map(lambda x: x[None], (memory, pending))
            out = flushing.flush(rule, *one, block=4)
            return jax.tree.map(lambda x: x[0], out)

        self.push, self.flush = push, flush

    def queue(self, signals: Signals, number: int = 0) -> Pending:
        """A queue that holds the first `number` tokens."""

        def keep(x: Any) -> Any:
            empty = np.zeros((x.shape[0], _CAPACITY - number, *x.shape[2:]))
            return np.concatenate([x[:, :number], empty], axis=1)

        return Pending(jax.tree.map(keep, signals), jnp.int32(number))

    def chunk(self, signals: Signals, first: int, last: int) -> Any:
        """The tokens from `first` up to `last` as one chunk, each with its target."""
        query, _, gate, mask = _part(signals, first, last)
        later = _part(signals, first + self.rule.lookahead, last + self.rule.lookahead)
        targets = self._targets(np.asarray(signals.value))[:, first:last]
        weights = WriteWeights(gate * mask * later.mask, jnp.ones_like(gate), mask)
        parts = _merge_tokens((query, np.asarray(targets), weights))
        return self.rule.chunk(*jax.tree.map(jnp.asarray, parts))

    def by_definition(
        self, memory: Memory, signals: Signals, calls: list[tuple[int, int]]
    ) -> tuple[Memory, np.ndarray, int]:
        """Memory, outputs and number of waiting tokens, by reading tokens and writing chunks.

        Of a rule that reads its own writes, by one step for each token.
        """
        outputs, first, seen = [], 0, 0
        if self.rule.reads_own_writes:
            for token in range(sum(length for length, _ in calls)):
                step = self.step(memory, self.chunk(signals, token, token + 1))
                memory, output = step.memory, step.output
                outputs.append(np.asarray(output))
            return memory, np.stack(outputs, axis=1), 0
        for length, chunk_size in calls:
            # First writes waiting chunks that this call's smaller chunk size makes complete.
            for token in [None, *range(length)]:
                if token is not None:
                    query = _part(signals, seen, seen + 1).query[:, 0]
                    outputs.append(np.asarray(self.read(memory, query)[0]))
                    seen += 1
                while seen - first >= chunk_size + self.rule.lookahead:
                    memory = self.write(memory, self.chunk(signals, first, first + chunk_size))
                    first += chunk_size
        return memory, np.stack(outputs, axis=1), seen - first


def stream_cut_anywhere_follows_its_definition(case: RuleCase) -> None:
    """Checks that tokens are read at once, and that complete chunks with lookahead are written.

    A rule that reads its own writes is checked with a memory of one sequence; no token waits.
    """
    stream = _stream(case)
    batch = 1 if stream.rule.reads_own_writes else BATCH
    rng = np.random.default_rng(0)
    for cut in range(_CUTS):
        calls = [_CALLS[i] for i in rng.integers(len(_CALLS), size=rng.integers(2, 7))]
        length = sum(length for length, _ in calls)
        signals = sample_signals(
            stream.rule, batch=batch, length=length, seed=cut, masked=cut % 2 == 1
        )
        expected_memory, expected, waiting = stream.by_definition(case.memory, signals, calls)
        memory, pending, outputs, first = case.memory, stream.queue(signals), [], 0
        for size, chunk_size in calls:
            piece = _part(signals, first, first + size)
            memory, pending, output, _ = stream.push(memory, pending, piece, chunk_size=chunk_size)
            outputs.append(output)
            first += size
        told = {"rtol": 1e-8, "atol": 1e-10}
        output = np.concatenate(outputs, axis=1)
        require_close(output, expected, f"outputs of the calls {calls}", **told)
        require_close(memory, expected_memory, f"the memory after the calls {calls}", **told)
        require(
            pending.num_waiting == waiting,
            f"{pending.num_waiting} tokens wait after the calls {calls}, expected {waiting}",
        )


def a_pass_and_a_stream_make_the_same_chunks(case: RuleCase) -> None:
    """Compares the tokens of the first chunk whose target lies in that chunk."""
    stream, size = _stream(case), 3
    signals = sample_signals(stream.rule, length=2 * size, masked=True)
    query, value, gate, mask = signals
    passed = stream.rule.sequence(
        *(jnp.asarray(query), jnp.asarray(value)),
        gate=jnp.asarray(gate),
        mask=jnp.asarray(mask),
        chunk_size=size,
    )
    streamed, paired = stream.chunk(signals, 0, size), max(0, size - stream.rule.lookahead)
    for name in ("query", "target", "write_weight", "counted"):
        ours = np.asarray(getattr(streamed, name))
        ours = ours.reshape(len(gate), size, *ours.shape[1:])[:, :paired]
        require_close(ours, np.asarray(getattr(passed, name))[:, :paired], name)


def read_and_write_make_a_step(case: RuleCase) -> None:
    """Checks that `read` gives a step's output and access, and `write` its memory.

    Of a rule that reads its own writes, `read` gives the output of a step that writes nothing.
    """
    rule = _chunk_rule(case)
    sequence = case.to_sequence(sample_signals(rule, length=3, masked=True), chunk_size=3)
    chunk = _merge_tokens(sequence)

    @jax.jit
    def parts(memory: Memory, chunk: Any) -> Any:
        step = read = rule.step(memory, chunk)
        if rule.reads_own_writes:
            nothing = jnp.zeros_like(chunk.counted)
            read = rule.step(memory, chunk._replace(write_weight=nothing, counted=nothing))
        return (read.output, read.access, step.memory), (
            *rule.read(memory, chunk.query),
            rule.write(memory, chunk),
        )

    step, apart = parts(case.memory, chunk)
    for ours, theirs, what in zip(apart, step, ("read", "access", "write"), strict=True):
        require_close(ours, theirs, what, rtol=1e-11)


def reads_leave_no_trace_and_see_no_other_token(case: RuleCase) -> None:
    rule, read = _chunk_rule(case), _stream(case).read
    query = np.asarray(sample_signals(rule, length=1).query[:, 0])
    changed = query * np.array([1.0, -2.0])[:, None, None]
    together, other = (np.asarray(read(case.memory, x)[0]) for x in (query, changed))
    require_equal(other[0], together[0], "a token read beside another one")


def values_of_zeros_read_as_zeros(case: RuleCase) -> None:
    """Checks that a memory of slots has the field `values`, and that reads are made of it alone."""
    rule, memory = _chunk_rule(case), case.memory
    if rule.num_slots is None:
        return
    require(hasattr(memory, "values"), "a memory of slots has no field `values`")
    empty = memory._replace(values=jnp.zeros_like(memory.values))
    query = np.asarray(sample_signals(rule, length=1).query[:, 0])
    output, _ = _stream(case).read(empty, query)
    require(np.all(np.asarray(output) == 0), "a memory whose values are zeros reads something")


def blocks_write_what_the_chunk_writes(case: RuleCase) -> None:
    """Checks `write_blocks` with a half-empty last block, and with no block at all."""
    rule, size, length, most = _chunk_rule(case), 4, 10, 4
    sequence = case.to_sequence(
        sample_signals(rule, batch=1, length=length, masked=True), chunk_size=length
    )
    chunk = jax.tree.map(lambda x: x[0], sequence)

    @jax.jit
    def written(memory: Memory, chunk: Any, number: jax.Array) -> Memory:
        padded = jax.tree.map(
            lambda x: jnp.pad(x, [(0, most * size - length)] + [(0, 0)] * (x.ndim - 1)), chunk
        )

        def block(number: jax.Array) -> Any:
            return jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, number * size, size), padded
            )

        return rule.write_blocks(memory, ChunkBlocks(block, number, most))

    # There is one more block than the tokens need; it is never requested.
    ours = written(case.memory, chunk, jnp.int32(-(-length // size)))
    require_close(ours, jax.jit(rule.write)(case.memory, chunk), "the memory after the blocks")
    require_equal(written(case.memory, chunk, jnp.int32(0)), case.memory, "without any block")


def flush_writes_the_complete_pairs_once(case: RuleCase) -> None:
    stream = _stream(case)
    lookahead, length = stream.rule.lookahead, 4
    signals, memory = sample_signals(stream.rule, length=length, masked=True), case.memory
    if lookahead:  # The first tokens have no target yet.
        early = stream.queue(signals, lookahead)
        same = stream.flush(memory, early)
        require_equal(same, (memory, early), "a flush without a complete pair")
    flushed, kept = stream.flush(memory, stream.queue(signals, length))
    expected = stream.write(memory, stream.chunk(signals, 0, length - lookahead))
    require_close(flushed, expected, "the memory after a flush", rtol=1e-9, atol=1e-11)
    require(
        kept.num_waiting == lookahead,
        f"{kept.num_waiting} tokens wait after a flush, expected {lookahead}",
    )
    require_equal(stream.flush(flushed, kept), (flushed, kept), "a second flush")


def _chunk_rule(case: RuleCase) -> AbstractChunkRule:
    return cast(AbstractChunkRule, case.rule)


def _stream(case: RuleCase) -> _Stream:
    if "_stream" not in case.__dict__:
        case.__dict__["_stream"] = _Stream(_chunk_rule(case))
    return case.__dict__["_stream"]


def _part(signals: Signals, first: int, last: int) -> Signals:
    return Signals(*(np.asarray(x)[:, first:last] for x in signals))  # pyright: ignore


def _merge_tokens(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


STREAM_PROPERTIES: dict[str, Property] = {
    check.__name__: check
    for check in (
        a_pass_and_a_stream_make_the_same_chunks,
        read_and_write_make_a_step,
        reads_leave_no_trace_and_see_no_other_token,
        values_of_zeros_read_as_zeros,
        blocks_write_what_the_chunk_writes,
        stream_cut_anywhere_follows_its_definition,
        flush_writes_the_complete_pairs_once,
    )
}
"""Properties of every `AbstractChunkRule`, in addition to those of an `AbstractRule`, by name."""
