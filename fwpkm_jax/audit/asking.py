"""Asks a `LanguageModel` under every condition: written, frozen, reset, with another memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy.special import log_softmax

from fwpkm_jax.audit.lines import Line, compare, judged
from fwpkm_jax.audit.origin import Answer
from fwpkm_jax.audit.paths import for_rows
from fwpkm_jax.audit.questions import Questions
from fwpkm_jax.core.chunks import map_unshared
from fwpkm_jax.data import load_tokenizer
from fwpkm_jax.evaluation.interface import Subject
from fwpkm_jax.evaluation.recall import attention_reach
from fwpkm_jax.generation import GenerationState, generate, init_generation
from fwpkm_jax.generation.generate import with_memory
from fwpkm_jax.models.language_model import LanguageModel, Stream

Ask = Callable[[np.ndarray, list[np.ndarray], np.ndarray], np.ndarray]
"""`ask(texts, questions, expected)`: generated tokens `[texts, new]`. A program that forces digits
reads the last argument, which must not matter."""


class _Asked(NamedTuple):
    """What one question of each text got.

    Attributes:
      tokens: freely generated, `[texts, answer]`.
      forced: whether each token of the value is the likeliest behind those before it.
      first: whether the value's first token is the likeliest of those that can stand there.
      nats: of the whole value, `[texts]`.
    """

    tokens: np.ndarray
    forced: np.ndarray
    first: np.ndarray
    nats: np.ndarray


def answers_of(subject: Subject, questions: Questions, *, run: str) -> list[Answer]:
    """What the model says to every question under every condition that it has.

    Each text is read by a sequence of its own with a memory of its own, through `generate`.
    Questions are asked aside: they are not written, and leave no trace.

    Args:
      subject: the model and its memory, of which the first group is used.
      questions: see `Questions`.
      run: the model's name in the records.
    """
    model = subject.model
    decode = _decoder(subject)
    records = []
    for condition, state in _states(subject, questions):
        for number in range(len(questions.questions[0])):
            row = [asked[number] for asked in questions.questions]
            got = _ask(model, state, questions, number)
            for document, one in enumerate(row):
                length = questions.texts.shape[1]
                answer = got.tokens[document]
                records.append(
                    Answer(
                        run=run,
                        document=document,
                        question=number,
                        condition=condition,
                        depth=one.stated / length,
                        distance=length - one.stated,
                        reach=attention_reach(model.config).stack,
                        written=_is_written(model, one.stated + len(one.answer), length),
                        expected=decode(one.answer),
                        answer=decode(answer),
                        exact=bool(np.array_equal(answer, one.answer)),
                        forced=float(np.mean(got.forced[document])),
                        first=bool(got.first[document]),
                        nats=float(got.nats[document]),
                        chance=questions.chance,
                        first_chance=1 / len(questions.first_tokens),
                    )
                )
    return records


def other_paths(subject: Subject, questions: Questions) -> Line:
    """The line of paths past the memory: with caches empty and writing disabled, none may be left.

    The texts' values are changed; no logits of the last question may then move in any bit.
    """

    def logits(write: bool) -> list[np.ndarray]:
        return [
            _last_logits(subject, questions, texts, write=write, keep_caches=False)
            for texts in (questions.texts, questions.others)
        ]

    seen = not compare(*logits(write=True)).same
    return covers("paths past the memory", *logits(write=False), seen=seen)


def _last_logits(
    subject: Subject, questions: Questions, texts: np.ndarray, *, write: bool, keep_caches: bool
) -> np.ndarray:
    """Logits of the last question about each text."""
    state = _read(subject, texts, write=write)
    state = state if keep_caches else _emptied(subject.model, state)
    return _forced_logits(subject.model, state.stream, questions, -1)


def covers(name: str, logits: np.ndarray, others: np.ndarray, *, seen: bool = True) -> Line:
    """The line of a question that is asked where the memory was not written.

    Args:
      name: of what is asked.
      logits: of the questions, `[questions, ...]`.
      others: the same after a text that states other values.
      seen: whether those values move the logits once they are written, as they must.
    """
    found = compare(others, logits)
    moved = np.any(np.reshape(np.asarray(logits) != np.asarray(others), (len(logits), -1)), axis=1)
    if not seen:
        text = "Other values move no question even when they are written: it cannot fail."
    elif found.same:
        text = "With the memory frozen, other values in the text move no bit of any question."
    else:
        text = (
            f"With the memory frozen, other values in the text move {int(moved.sum())} of "
            f"{len(moved)} questions by up to {found.largest:.2g}: a window, a convolution or a "
            "cache covers the needle, and its answers are not the memory's."
        )
    return Line(
        section="origin",
        name=name,
        verdict=judged(found.same and seen),
        text=text,
        numbers={"moved": int(moved.sum()), "questions": len(moved), "largest": found.largest},
    )


def answers_freely(
    name: str,
    ask: Ask,
    texts: np.ndarray,
    questions: list[np.ndarray],
    expected: np.ndarray,
    others: np.ndarray,
) -> Line:
    """The line of generation: pass if answers are the same whatever is expected.

    Args:
      name: of the program.
      ask: see `Ask`.
      texts: `[texts, length]`.
      questions: one for each text.
      expected: values `[texts, new]`.
      others: other values, in place of the expected ones.
    """
    found, again = ask(texts, questions, expected), ask(texts, questions, others)
    same = np.array_equal(found, again)
    changed = int(np.any(found != again, axis=1).sum())
    text = (
        "Answers do not depend on what is expected: they are generated."
        if same
        else f"{changed} of {len(found)} answers change with what is expected: an accuracy on "
        "forced digits, which is no recall."
    )
    return Line(section="origin", name=name, verdict=judged(same), text=text)


def generates_freely(subject: Subject, questions: Questions) -> Line:
    """The line of the audit's own answers."""
    model = subject.model
    state = _read(subject, questions.texts, write=True)

    def ask(texts: np.ndarray, asked: list[np.ndarray], expected: np.ndarray) -> np.ndarray:
        del texts
        return _generated(model, state, asked, expected.shape[1])

    first = [asked[0] for asked in questions.questions]
    expected = np.stack([one.answer for one in first])
    return answers_freely(
        "answers are generated",
        ask,
        questions.texts,
        [one.tokens for one in first],
        expected,
        np.roll(expected, 1, axis=0),
    )


def _states(subject: Subject, questions: Questions) -> Iterator[tuple[str, GenerationState]]:
    """The state in which each condition asks."""
    model = subject.model
    start = for_rows(subject.first_memory, len(questions.texts))
    written = _read(subject, questions.texts, write=True)
    emptied = _emptied(model, written)
    yield "written, caches kept", written
    if not start:
        yield "not stated", _read(subject, questions.others, write=True)
        return
    memory = emptied.stream.memory
    yield "written", emptied
    yield "reset", with_memory(emptied, start)
    yield (
        "other memory",
        with_memory(emptied, map_unshared(lambda x: jnp.roll(x, 1, axis=0), memory)),
    )
    if model.config.fast_weight.rule.num_slots is not None:
        none = {
            name: one._replace(values=jnp.zeros_like(one.values)) for name, one in memory.items()
        }
        yield "without reads", with_memory(emptied, none)
    frozen = _read(subject, questions.texts, write=False)
    yield "frozen, caches kept", frozen
    yield "frozen", _emptied(model, frozen)
    yield "not stated", _emptied(model, _read(subject, questions.others, write=True))


def _read(subject: Subject, texts: np.ndarray, *, write: bool) -> GenerationState:
    """The state behind the texts `[texts, length]`, each read into a memory of its own."""
    model, (rows, length) = subject.model, texts.shape
    # Room for question and answer, which full attention keeps, too.
    state = init_generation(
        model, for_rows(subject.first_memory, rows), batch=rows, max_length=2 * length + 256
    )
    return generate(model, list(texts), state, max_new_tokens=0, write=write).state


def _emptied(model: LanguageModel, state: GenerationState) -> GenerationState:
    """The state with empty caches at position 0: only the memory is left of what was read."""
    return state._replace(stream=model.reset_caches(state.stream, pending=True))


def _is_written(model: LanguageModel, end: int, length: int) -> bool:
    """Whether tokens up to `end` were written before the end of a text."""
    if not model.config.memory_layers:
        return True
    config = model.config.fast_weight
    writes = max(0, length - config.rule.lookahead) // config.chunk_size
    return end <= writes * config.chunk_size


def _ask(model: LanguageModel, state: GenerationState, questions: Questions, number: int) -> _Asked:
    """Asks the same question number of every text."""
    row = [asked[number] for asked in questions.questions]
    answers = np.stack([one.answer for one in row])
    tokens = _generated(model, state, [one.tokens for one in row], answers.shape[1])
    logits = _forced_logits(model, state.stream, questions, number).astype(np.float64)
    log_probs = log_softmax(logits, axis=-1)
    chosen = np.take_along_axis(log_probs, answers[..., None], axis=-1)[..., 0]
    among = logits[:, 0][:, questions.first_tokens]
    return _Asked(
        tokens,
        forced=np.argmax(logits, axis=-1) == answers,
        first=questions.first_tokens[np.argmax(among, axis=-1)] == answers[:, 0],
        nats=-chosen.sum(axis=1),
    )


def _generated(
    model: LanguageModel, state: GenerationState, questions: list[np.ndarray], length: int
) -> np.ndarray:
    """Freely generated tokens `[texts, length]`; the state stays as it is."""
    out = generate(model, questions, state, max_new_tokens=length, write=False, keep_state=True)
    return np.asarray(out.tokens)


def _forced_logits(
    model: LanguageModel, stream: Stream, questions: Questions, number: int
) -> np.ndarray:
    """Logits `[texts, answer, vocab]` behind a question and each token of its value but one."""
    graphdef, params = nnx.split(model)
    row = [asked[number] for asked in questions.questions]
    tokens = [np.concatenate([one.tokens, one.answer[:-1]]) for one in row]
    longest = max(len(one.tokens) + len(one.answer) - 1 for asked in questions.questions
                  for one in asked)  # fmt: skip
    padded = np.stack([np.pad(x, (longest - len(x), 0)) for x in tokens]).astype(np.int32)
    mask = np.stack([np.arange(longest) >= longest - len(x) for x in tokens]).astype(np.float32)
    count = len(row[0].answer)
    return np.asarray(_behind(graphdef, params, stream, padded, mask, count=count))


@partial(jax.jit, static_argnames=("graphdef", "count"))
def _behind(
    graphdef: Any,
    params: Any,
    stream: Stream,
    tokens: jax.Array,
    mask: jax.Array,
    *,
    count: int,
) -> jax.Array:
    out = nnx.merge(graphdef, params).stream(tokens, stream, mask=mask, write=False)
    return out.logits[:, -count:]


def _decoder(subject: Subject) -> Callable[[np.ndarray], str]:
    """A value's tokens as text; of generated data their numbers."""
    if subject.data is not None and subject.data.text is not None:
        tokenizer = load_tokenizer(subject.data.text.tokenizer)
        return lambda tokens: tokenizer.decode([int(token) for token in tokens if token >= 0])
    return lambda tokens: " ".join(str(int(token)) for token in tokens)
