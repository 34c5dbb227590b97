"""Texts read side by side: log-likelihoods of continuations, and greedy answers.

Each text of a batch has a memory of its own, so a text gives the same numbers as alone. Batches
have few shapes: prompts are padded in front to a few lengths, and the last batch is filled up.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.core.chunks import map_unshared
from fwpkm_jax.core.streams.pending import ChunkSize
from fwpkm_jax.evaluation.readers.finite import likeliest, not_finite, require_finite
from fwpkm_jax.evaluation.readers.stream_reader import flush, label_losses, reset_caches
from fwpkm_jax.evaluation.record import first_group
from fwpkm_jax.generation import GenerationState, Sampling, generate, init_generation
from fwpkm_jax.generation.prompts import split_prompts
from fwpkm_jax.literals import Checked, Count
from fwpkm_jax.models.language_model import LanguageModel, Memory, Stream

_LEAST_ROOM = 128  # Smallest capacity of full attention's cache; the others are 2, 4, ... times it.
_TOKENS_AT_ONCE = 32  # New tokens between two looks at the answers.
_EMPTY = np.zeros(0, np.int32)


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(Checked):
    """How texts are read side by side."""

    memory_reset: Literal["text", "never"] = "text"
    """text: every text starts from the checkpoint's memory. never: the memory goes on from text to
    text, in the order given; needs a batch size of 1."""
    batch_size: Count = 8
    """Texts read side by side; each has its own copy of a memory that is written."""
    chunk_size: Count | None = None
    """Tokens per write. None: the model's."""
    piece_length: Count = 512
    """Tokens read per call; limits the device memory needed and does not change results."""
    readings: Count = 1
    """How often a document is read, and written to its end, before its question."""
    attention: Literal["document", "question"] = "document"
    """Where attention and recurrent layers start before an answer. question: they are emptied
    before the question, so that only the memory knows the document."""


class Part(NamedTuple):
    """Tokens to read and tokens to score after them, int `[tokens]` each; neither is empty."""

    context: np.ndarray
    continuation: np.ndarray


class Text(NamedTuple):
    """What is scored of a text, and the document before it, int `[tokens]`, which may be empty.

    Attention and recurrent state start empty in each later part; the memory goes on to it.
    """

    parts: Sequence[Part]
    document: np.ndarray = _EMPTY


class LogLikelihood(NamedTuple):
    """The score of a continuation."""

    nats: float
    """Sum of its tokens' log-probabilities."""
    greedy: bool
    """Whether each of its tokens is the most likely one."""


class Prompt(NamedTuple):
    """What is read before an answer, int `[tokens]` each; only the document may be empty."""

    question: np.ndarray
    document: np.ndarray = _EMPTY


class BatchReader:
    """Reads texts side by side, each from the checkpoint's memory or from what was written before.

    A memory that goes on from text to text also holds what waits at the end of each text.
    """

    def __init__(
        self, model: LanguageModel, memory: Memory, options: ReadingOptions, *, write: bool = True
    ):
        """Prepares the reading.

        Args:
          model: the language model.
          memory: fast weights, leaves `[groups, ...]`, of which the first group is used.
          options: how texts are read.
          write: False disables writing.

        Raises:
          ValueError: a batch has several texts with one written memory for all of them.
        """
        keeps = options.memory_reset == "never" and write
        if keeps and options.batch_size > 1:
            raise ValueError(
                f"batch_size={options.batch_size} with memory_reset='never': a memory that goes on "
                "from text to text reads one at a time; set batch_size to 1."
            )
        self._model, self._memory, self._options = model, first_group(memory), options
        self._write, self._keeps = write, keeps
        self._graphdef, self._params = nnx.split(model)

    def log_likelihoods(self, texts: Sequence[Text]) -> list[list[LogLikelihood]]:
        """The score of every part of every text.

        Raises:
          ValueError: a part is empty, or a log-probability is not finite.
        """
        for number, text in enumerate(texts):
            if not text.parts or any(not len(x) for part in text.parts for x in part):
                raise ValueError(f"Text {number} has an empty context or continuation.")
        sizes = [
            len(text.document) + max(sum(map(len, part)) for part in text.parts) for text in texts
        ]
        found: dict[int, list[LogLikelihood]] = {}
        for chosen in self._batches(sizes):
            rows = [texts[number] for number in chosen]
            found |= zip(chosen, self._score(rows, max(sizes[n] for n in chosen)), strict=True)
        return [found[number] for number in range(len(texts))]

    def answers(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        ended: Callable[[np.ndarray], bool] = lambda tokens: False,
    ) -> list[np.ndarray]:
        """Greedy answers, int32 `[tokens]` each, without the token that stopped them.

        Args:
          prompts: questions, and the documents before them.
          max_new_tokens: most tokens of an answer.
          stop_ids: tokens that end an answer.
          ended: whether an answer so far, `[tokens]`, needs no further token.

        Raises:
          ValueError: a question is empty, or a log-probability is not finite.
        """
        for number, prompt in enumerate(prompts):
            if not len(prompt.question):
                raise ValueError(f"Prompt {number} has no token to answer after.")
        sizes = [len(prompt.document) + len(prompt.question) + max_new_tokens for prompt in prompts]
        found: dict[int, np.ndarray] = {}
        for chosen in self._batches(sizes):
            rows = [prompts[number] for number in chosen]
            state = self._after([row.document for row in rows], max(sizes[n] for n in chosen))
            answers = self._answer(rows, state, max_new_tokens, stop_ids, ended)
            found |= zip(chosen, answers, strict=True)
        return [found[number] for number in range(len(prompts))]

    def _batches(self, sizes: Sequence[int]) -> Iterator[list[int]]:
        """Numbers of the texts of each batch; the last batch repeats one to be as large.

        Texts of similar sizes go together unless the memory makes the order matter.
        """
        size = self._options.batch_size
        order = np.arange(len(sizes)) if self._keeps else np.argsort(-np.asarray(sizes, np.int64))
        for start in range(0, len(order), size):
            chosen = order[start : start + size].tolist()
            yield chosen + chosen[-1:] * (size - len(chosen))

    def _after(self, documents: Sequence[np.ndarray], longest: int) -> GenerationState:
        """The state in which questions are read, with room for `longest` tokens of a text."""
        memory, batch = self._memory, self._options.batch_size
        if self._write and batch > 1:  # Each text writes a copy of its own.
            memory = map_unshared(lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), memory)
        state = init_generation(
            self._model,
            memory,
            batch=batch,
            max_length=_room(longest),
            max_chunk_size=self._options.chunk_size,
        )
        seen = self._options.attention == "document"
        if not any(map(len, documents)) or not (seen or self._write):
            return state
        for reading in range(self._options.readings if self._write else 1):
            if reading:
                state = self._emptied(state)
            state = self._generate(documents, state, max_new_tokens=0).state
            if self._write:
                stream = flush(self._graphdef, self._params, state.stream)
                state = state._replace(stream=stream)
        return state if seen else self._emptied(state)

    def _emptied(self, state: GenerationState) -> GenerationState:
        """The state with its memory, and the tokens that wait to be written into it, alone."""
        stream = reset_caches(self._graphdef, self._params, state.stream, pending=False)
        return state._replace(stream=stream, num_read=jnp.zeros_like(state.num_read))

    def _generate(self, prompts: Any, state: GenerationState, **options: Any) -> Any:
        return generate(
            self._model,
            prompts,
            state,
            write=self._write,
            chunk_size=self._options.chunk_size,
            piece_length=self._options.piece_length,
            **options,
        )

    def _keep(self, stream: Stream) -> None:
        """Goes on from the memory of a stream, if memories go on."""
        if self._keeps:
            self._memory = flush(self._graphdef, self._params, stream).memory

    def _score(self, rows: Sequence[Text], longest: int) -> list[list[LogLikelihood]]:
        found: list[list[LogLikelihood]] = [[] for _ in rows]
        stream = self._after([row.document for row in rows], longest).stream
        for number in range(max(len(row.parts) for row in rows)):
            if number:
                stream = reset_caches(self._graphdef, self._params, stream, pending=False)
            parts = [row.parts[number] if number < len(row.parts) else None for row in rows]
            losses, right, stream = self._read(parts, stream)
            for index, part in enumerate(parts):
                if part is None:
                    continue
                own = slice(losses.shape[1] - len(part.continuation), None)
                nats = require_finite(losses[index, own], where="The continuation")
                score = -float(np.sum(nats, dtype=np.float64))
                found[index].append(LogLikelihood(score, bool(right[index, own].all())))
        self._keep(stream)
        return found

    def _read(
        self, parts: Sequence[Part | None], stream: Stream
    ) -> tuple[np.ndarray, np.ndarray, Stream]:
        """Losses in nats `[batch, padded length]`, whether each label is the most likely token."""
        whole = [_EMPTY if part is None else np.concatenate(part) for part in parts]
        inputs, labels = ([x[cut].astype(np.int32) for x in whole] for cut in _SHIFTED)
        cut = partial(split_prompts, piece_length=self._options.piece_length)
        found = []
        for pieces, answers in zip(cut(inputs), cut(labels), strict=True):
            for index in range(pieces.number):
                stream, *scores = _score_piece(
                    *(self._graphdef, self._params, stream),
                    *(pieces.tokens[index], answers.tokens[index]),
                    None if pieces.mask is None else pieces.mask[index],
                    write=self._write,
                    chunk_size=self._options.chunk_size,
                )
                found.append(scores)
        losses, right = zip(*jax.device_get(found), strict=True)
        return np.concatenate(losses, axis=1), np.concatenate(right, axis=1), stream

    def _answer(
        self,
        rows: Sequence[Prompt],
        state: GenerationState,
        limit: int,
        stop_ids: Sequence[int],
        ended: Callable[[np.ndarray], bool],
    ) -> list[np.ndarray]:
        answers = [_EMPTY for _ in rows]
        prompts: Sequence[np.ndarray] | None = [row.question for row in rows]
        left, sampling = limit, Sampling(stop_ids=stop_ids)
        while True:
            # A memory that goes on must not hold tokens behind the end of an answer.
            new = min(left, 1 if self._keeps else _TOKENS_AT_ONCE)
            output = self._generate(prompts, state, max_new_tokens=new, sampling=sampling)
            state, prompts, left = output.state, None, left - new
            if output.failed.any():
                raise not_finite("The answer")
            for index, block in enumerate(np.asarray(output.tokens)):
                block = block[: int(output.lengths[index])]
                block = block[~np.isin(block, sampling.stop_ids)]
                answers[index] = np.concatenate([answers[index], block])
            finished = np.asarray(state.finished)
            if left <= 0 or all(
                done or ended(answer) for done, answer in zip(finished, answers, strict=True)
            ):
                break
        self._keep(state.stream)
        return answers


_SHIFTED = (slice(None, -1), slice(1, None))
"""Inputs and labels of a sequence of tokens."""


def _room(tokens: int) -> int:
    """Tokens that full attention keeps: few sizes, because each is compiled separately."""
    room = _LEAST_ROOM
    while room < tokens:
        room *= 2
    return room


@partial(jax.jit, static_argnames=("graphdef", "write", "chunk_size"), donate_argnames="stream")
def _score_piece(
    graphdef: Any,
    params: Any,
    stream: Stream,
    tokens: jax.Array,
    labels: jax.Array,
    mask: jax.Array | None,
    *,
    write: bool,
    chunk_size: ChunkSize | None,
) -> tuple[Stream, jax.Array, jax.Array]:
    """The stream after a piece `[batch, piece]`, whose buffers are reused; losses, right labels."""
    out = nnx.merge(graphdef, params).stream(
        tokens, stream, mask=mask, write=write, chunk_size=chunk_size
    )
    return out.stream, label_losses(out.logits, labels), likeliest(out.logits) == labels
