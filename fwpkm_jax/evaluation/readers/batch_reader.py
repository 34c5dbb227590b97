"""Texts read side by side: log-likelihoods of continuations, and greedy answers.

Each text of a batch has a memory of its own, so a text gives the same numbers as alone. Batches
have few shapes: prompts are padded in front to a few lengths, and the last batch is filled up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.core.chunks import map_own
from fwpkm_jax.core.streams.queue import ChunkSize
from fwpkm_jax.evaluation.readers.finite import likeliest, not_finite, require_finite
from fwpkm_jax.evaluation.readers.stream_reader import flush, label_losses, reset_caches
from fwpkm_jax.evaluation.record import first_group
from fwpkm_jax.generation import GenerationState, Sampling, generate, init_generation
from fwpkm_jax.generation.prompts import split_prompts
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.models.language_model import LanguageModel, Memory, Stream

MemoryReset = Literal["text", "never"]
"""When memories start again from the checkpoint's: before each text, or only before the first."""

_LEAST_ROOM = 128  # Smallest capacity of full attention's cache; the others are 2, 4, ... times it.
_TOKENS_AT_ONCE = 32  # New tokens between two looks at the answers.


def passes_of(write: Literal["both", "on", "off"]) -> tuple[tuple[str, bool], ...]:
    """Names of the passes that an option `write` asks for, and whether each writes."""
    passes = (("writing", True), ("frozen", False))
    return {"both": passes, "on": passes[:1], "off": passes[1:]}[write]


def check_one_device(partition: Partition | None, what: str) -> None:
    """Raises ValueError if an evaluation that reads texts side by side is given several devices."""
    if partition is not None:
        raise ValueError(f"{what} reads its texts on one device; leave out --mesh.")


class Part(NamedTuple):
    """Tokens to read and tokens to score after them, int `[tokens]` each; neither is empty."""

    context: np.ndarray
    continuation: np.ndarray


class LogLikelihood(NamedTuple):
    """The score of a continuation."""

    nats: float
    """Sum of its tokens' log-probabilities."""
    greedy: bool
    """Whether each of its tokens is the most likely one."""


class Prompt(NamedTuple):
    """What is read before an answer, int `[tokens]` each; `question` is not empty."""

    context: np.ndarray
    question: np.ndarray


class BatchReader:
    """Reads texts side by side, each from the checkpoint's memory or from what was written before.

    With `memory_reset="never"` texts are read one at a time, in the order given, and the memory
    goes on from text to text; what waits at the end of a text is written there.
    """

    def __init__(
        self,
        model: LanguageModel,
        memory: Memory,
        *,
        write: bool = True,
        memory_reset: MemoryReset = "text",
        batch_size: int = 8,
        chunk_size: int | None = None,
        piece_length: int = 512,
    ):
        """Prepares the reading.

        Args:
          model: the language model.
          memory: fast weights, leaves `[groups, ...]`, of which the first group is used.
          write: False disables writing.
          memory_reset: when memories start again.
          batch_size: texts side by side; each has its own copy of the memory if it is written.
          chunk_size: tokens per write; None: the model's.
          piece_length: tokens of each text read per call; limits the device memory needed and does
            not change results.

        Raises:
          ValueError: `batch_size` is below 1, or above 1 with one memory for all texts.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1.")
        if memory_reset == "never" and write and batch_size > 1:
            raise ValueError(
                f"batch_size={batch_size} with memory_reset='never': a memory that goes on from "
                "text to text reads one at a time; set batch_size to 1."
            )
        self._model, self._memory = model, first_group(memory)
        self._batch, self._piece = batch_size, piece_length
        self._write, self._keeps = write, memory_reset == "never" and write
        self._chunk_size = chunk_size
        self._graphdef, self._params = nnx.split(model)

    def log_likelihoods(
        self,
        texts: Sequence[Sequence[Part]],
        *,
        done: Callable[[int], None] = lambda number: None,
    ) -> list[list[LogLikelihood]]:
        """The score of every part of every text.

        Args:
          texts: the parts of each text, read in order. Attention and recurrent state start empty in
            each part; the memory goes on to the next part of the same text.
          done: called with the number of texts that were read.

        Raises:
          ValueError: a part is empty, or a log-probability is not finite.
        """
        for number, text in enumerate(texts):
            if not text or any(not len(x) for part in text for x in part):
                raise ValueError(f"Text {number} has an empty context or continuation.")
        sizes = [max(len(part.context) + len(part.continuation) for part in x) for x in texts]
        found: dict[int, list[LogLikelihood]] = {}
        for chosen in self._batches(sizes):
            rows = [texts[number] for number in chosen]
            found |= zip(chosen, self._score(rows), strict=False)  # The rest fills the batch up.
            done(len(set(chosen)))
        return [found[number] for number in range(len(texts))]

    def answers(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        vocab_size: int | None = None,
        ended: Callable[[np.ndarray], bool] = lambda tokens: False,
        done: Callable[[int], None] = lambda number: None,
    ) -> list[np.ndarray]:
        """Greedy answers, int32 `[tokens]` each, without the token that stopped them.

        A context is read and written to its end, then the question is read.

        Args:
          prompts: contexts, which may be empty, and questions.
          max_new_tokens: most tokens of an answer.
          stop_ids: tokens that end an answer.
          vocab_size: ids below this number may be answered; None: the model's.
          ended: whether an answer so far, `[tokens]`, needs no further token.
          done: called with the number of prompts that were answered.

        Raises:
          ValueError: a question is empty, or a log-probability is not finite.
        """
        for number, prompt in enumerate(prompts):
            if not len(prompt.question):
                raise ValueError(f"Prompt {number} has no token to answer after.")
        sizes = [len(prompt.context) + len(prompt.question) for prompt in prompts]
        found: dict[int, np.ndarray] = {}
        for chosen in self._batches(sizes):
            rows = [prompts[number] for number in chosen]
            answers = self._answer(rows, max_new_tokens, stop_ids, vocab_size, ended)
            found |= zip(chosen, answers, strict=False)
            done(len(set(chosen)))
        return [found[number] for number in range(len(prompts))]

    def _batches(self, sizes: Sequence[int]) -> Iterator[list[int]]:
        """Numbers of the texts of each batch; the last batch repeats one to be as large.

        Texts of similar sizes go together unless the memory makes the order matter.
        """
        order = np.arange(len(sizes)) if self._keeps else np.argsort(-np.asarray(sizes, np.int64))
        for start in range(0, len(order), self._batch):
            chosen = order[start : start + self._batch].tolist()
            yield chosen + chosen[-1:] * (self._batch - len(chosen))

    def _start(self) -> Memory:
        """The memory that a batch starts from: one for each text if it is written."""
        if not self._write or self._batch == 1:
            return self._memory
        return map_own(lambda x: jnp.broadcast_to(x, (self._batch, *x.shape[1:])), self._memory)

    def _new_state(self, batch: int, longest: int) -> GenerationState:
        """Empty caches with room for `longest` tokens of a text, and the memory to start from."""
        return init_generation(
            self._model,
            self._start(),
            batch=batch,
            max_length=_room(longest),
            max_chunk_size=self._chunk_size,
        )

    @contextlib.contextmanager
    def _kept(self) -> Iterator[list[Stream]]:
        """Takes the memory from the stream that the caller puts into the list."""
        after: list[Stream] = []
        yield after
        if self._keeps:
            self._memory = flush(self._graphdef, self._params, after[-1]).memory

    def _score(self, rows: Sequence[Sequence[Part]]) -> list[list[LogLikelihood]]:
        found: list[list[LogLikelihood]] = [[] for _ in rows]
        longest = max(len(part.context) + len(part.continuation) for row in rows for part in row)
        with self._kept() as after:
            stream = self._new_state(len(rows), longest).stream
            for number in range(max(map(len, rows))):
                if number:
                    stream = reset_caches(self._graphdef, self._params, stream, pending=False)
                parts = [row[number] if number < len(row) else None for row in rows]
                losses, right, stream = self._read(parts, stream)
                for index, part in enumerate(parts):
                    if part is None:
                        continue
                    own = slice(losses.shape[1] - len(part.continuation), None)
                    nats = require_finite(losses[index, own], where="The continuation")
                    score = -float(np.sum(nats, dtype=np.float64))
                    found[index].append(LogLikelihood(score, bool(right[index, own].all())))
            after.append(stream)
        return found

    def _read(
        self, parts: Sequence[Part | None], stream: Stream
    ) -> tuple[np.ndarray, np.ndarray, Stream]:
        """Losses in nats `[batch, padded length]`, whether each label is the most likely token."""
        none = np.zeros(0, np.int32)
        whole = [none if part is None else np.concatenate(part) for part in parts]
        inputs, labels = ([x[cut].astype(np.int32) for x in whole] for cut in _SHIFTED)
        losses, right = [], []
        cut = partial(split_prompts, piece_length=self._piece)
        for pieces, answers in zip(cut(inputs), cut(labels), strict=True):
            stream, *scores = _score_pieces(
                *(self._graphdef, self._params, stream, pieces.tokens, answers.tokens),
                *(pieces.mask, np.int32(pieces.number)),
                write=self._write,
                chunk_size=self._chunk_size,
            )
            for values, one in zip((losses, right), scores, strict=True):
                values.append(_in_order(np.asarray(one)[: pieces.number]))
        return np.concatenate(losses, axis=1), np.concatenate(right, axis=1), stream

    def _answer(
        self,
        rows: Sequence[Prompt],
        limit: int,
        stop_ids: Sequence[int],
        vocab_size: int | None,
        ended: Callable[[np.ndarray], bool],
    ) -> list[np.ndarray]:
        answers = [np.zeros(0, np.int32) for _ in rows]
        longest = max(len(x.context) + len(x.question) for x in rows) + limit
        state = self._new_state(len(rows), longest)
        if vocab_size is not None and vocab_size >= self._model.config.vocab_size:
            vocab_size = None
        ask = partial(
            generate,
            self._model,
            sampling=Sampling(vocab_size=vocab_size),
            stop_ids=stop_ids,
            write=self._write,
            chunk_size=self._chunk_size,
            piece_length=self._piece,
        )
        with self._kept() as after:
            if any(len(row.context) for row in rows):
                state = ask([row.context for row in rows], state, max_new_tokens=0).state
                if self._write:
                    stream = flush(self._graphdef, self._params, state.stream)
                    state = state._replace(stream=stream)
            prompts: Sequence[np.ndarray] | None = [row.question for row in rows]
            left, stops = limit, np.asarray(list(stop_ids), np.int32)
            while True:
                # A memory that goes on must not hold tokens behind the end of an answer.
                new = min(left, 1 if self._keeps else _TOKENS_AT_ONCE)
                output = ask(prompts, state, max_new_tokens=new)
                state, prompts, left = output.state, None, left - new
                if output.failed.any():
                    raise not_finite("The answer")
                for index, block in enumerate(np.asarray(output.tokens)):
                    block = block[: int(output.lengths[index])]
                    block = block[~np.isin(block, stops)]
                    answers[index] = np.concatenate([answers[index], block])
                finished = np.asarray(state.finished)
                if left <= 0 or all(
                    done or ended(answer) for done, answer in zip(finished, answers, strict=True)
                ):
                    break
            after.append(state.stream)
        return answers


_SHIFTED = (slice(None, -1), slice(1, None))
"""Inputs and labels of a sequence of tokens."""


def _room(tokens: int) -> int:
    """Tokens that full attention keeps: few sizes, because each is compiled separately."""
    room = _LEAST_ROOM
    while room < tokens:
        room *= 2
    return room


def _in_order(pieces: np.ndarray) -> np.ndarray:
    """`[pieces, batch, piece]` as `[batch, pieces * piece]`."""
    return np.swapaxes(pieces, 0, 1).reshape(pieces.shape[1], -1)


@partial(jax.jit, static_argnames=("graphdef", "write", "chunk_size"), donate_argnames="stream")
def _score_pieces(
    graphdef: Any,
    params: Any,
    stream: Stream,
    tokens: jax.Array,
    labels: jax.Array,
    mask: jax.Array | None,
    count: jax.Array,
    *,
    write: bool,
    chunk_size: ChunkSize | None,
) -> tuple[Stream, jax.Array, jax.Array]:
    """The stream after the first `count` pieces; losses and right labels `[pieces, batch, piece]`.

    Args:
      graphdef: the model's structure.
      params: its slow weights.
      stream: the state; its buffers are reused.
      tokens: `[pieces, batch, piece]`.
      labels: the next token of each.
      mask: 0 at padding; None without padding.
      count: how many of the pieces are read.
      write: False disables writing.
      chunk_size: tokens per write.
    """
    model = nnx.merge(graphdef, params)

    def read(index: jax.Array, carry: tuple[Stream, jax.Array, jax.Array]) -> Any:
        stream, losses, right = carry
        out = model.stream(
            tokens[index],
            stream,
            mask=None if mask is None else mask[index],
            write=write,
            chunk_size=chunk_size,
        )
        losses = losses.at[index].set(label_losses(out.logits, labels[index]))
        right = right.at[index].set(likeliest(out.logits) == labels[index])
        return out.stream, losses, right

    losses = jnp.zeros(tokens.shape, jnp.float32)
    return jax.lax.fori_loop(0, count, read, (stream, losses, jnp.zeros(tokens.shape, bool)))
