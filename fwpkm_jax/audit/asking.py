"""Asks a `LanguageModel` under every condition: written, frozen, reset, with another memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax

from fwpkm_jax.audit.lines import Line, difference_of, differences, judged
from fwpkm_jax.audit.origin import Answer
from fwpkm_jax.audit.paths import ModelProgram, for_rows
from fwpkm_jax.audit.questions import Question, Questions
from fwpkm_jax.core.chunks import map_unshared
from fwpkm_jax.data import AbstractDataConfig, Tokenizer, load_tokenizer
from fwpkm_jax.evaluation.interface import Subject
from fwpkm_jax.evaluation.recall import attention_reach
from fwpkm_jax.evaluation.reconfigure import without_memory_layers
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import Stream

_PIECE = 256  # Tokens of a text that are read in one call, whose logits are not kept.


class MaskedProgram(Protocol):
    """A `Program` that reads rows with padding."""

    def read(
        self, state: Any, tokens: np.ndarray, *, write: bool, mask: np.ndarray | None = None
    ) -> tuple[np.ndarray, Any]:
        """See `Program`; `mask` is 1 for real tokens, 0 for padding."""
        ...


def answers_of(subject: Subject, questions: Questions, *, run: str) -> list[Answer]:
    """What the model says to every question under every condition that it has.

    Each text is read by a sequence of its own with a memory of its own. Questions are asked aside:
    they are not written, and leave no trace. Answers are generated freely, the likeliest token each
    time; beside them stands what is likeliest behind the right tokens.

    Args:
      subject: the model and its memory, of which the first group is used.
      questions: see `Questions`.
      run: the model's name in the records.
    """
    program = ModelProgram(subject.model, subject.first_memory)
    return answers_to(
        program,
        _states(program, questions),
        questions,
        run=run,
        reach=attention_reach(subject.model.config).stack,
        is_written=partial(is_written, subject.model.config),
        data=subject.data,
    )


def answers_to(
    program: MaskedProgram,
    states: Iterable[tuple[str, Any]],
    questions: Questions,
    *,
    run: str,
    reach: int | None,
    is_written: Callable[[int, int], bool],
    data: AbstractDataConfig | None,
) -> list[Answer]:
    """What a program says to every question in every state.

    Args:
      program: see `MaskedProgram`.
      states: names of conditions, and the states in which they ask.
      questions: see `Questions`.
      run: the program's name in the records.
      reach: see `Answer`.
      is_written: given where a value ends and a text's length, whether the value was written.
      data: that the questions are made of; values that are no text are told as numbers.
    """
    length, text = questions.texts.shape[1], None if data is None else data.text
    tokenizer = None if text is None else load_tokenizer(text.tokenizer)
    records = []
    for condition, state in states:
        for number in range(len(questions.questions[0])):
            row = [asked[number] for asked in questions.questions]
            values = np.stack([one.answer for one in row])
            spoken, given = ask(program, state, row, questions)
            log_probs = log_softmax(given.astype(np.float64), axis=-1)
            nats = -np.take_along_axis(log_probs, values[..., None], axis=-1)[..., 0].sum(axis=1)
            first = questions.first_tokens[
                np.argmax(given[:, 0][:, questions.first_tokens], axis=-1)
            ]
            for document, one in enumerate(row):
                records.append(
                    Answer(
                        run=run,
                        document=document,
                        question=number,
                        condition=condition,
                        depth=one.stated / length,
                        distance=length - one.stated,
                        reach=reach,
                        written=is_written(one.stated + len(one.answer), length),
                        expected=_told(one.answer, tokenizer),
                        answer=_told(spoken[document], tokenizer),
                        exact=bool(np.array_equal(spoken[document], one.answer)),
                        forced=float(np.mean(np.argmax(given[document], axis=-1) == one.answer)),
                        first=bool(first[document] == one.answer[0]),
                        nats=float(nats[document]),
                        chance=questions.chance,
                        first_chance=1 / len(questions.first_tokens),
                    )
                )
    return records


def ask(
    program: MaskedProgram, state: Any, row: Sequence[Question], questions: Questions
) -> tuple[np.ndarray, np.ndarray]:
    """Freely generated tokens `[texts, answer]`, and logits `[texts, answer, vocab]`.

    The logits are those behind the question and behind each of the right tokens but the last. The
    state stays as it is.
    """
    longest = max(len(one.tokens) for asked in questions.questions for one in asked)
    tokens = np.stack([np.pad(one.tokens, (longest - len(one.tokens), 0)) for one in row])
    mask = np.stack([np.arange(longest) >= longest - len(one.tokens) for one in row])
    values = np.stack([one.answer for one in row]).astype(np.int32)
    logits, state = program.read(
        state, tokens.astype(np.int32), write=False, mask=mask.astype(np.float32)
    )
    given, spoken = [logits[:, -1:]], [np.argmax(logits[:, -1], axis=-1)]
    if values.shape[1] > 1:
        given.append(program.read(state, values[:, :-1], write=False)[0])
    while len(spoken) < values.shape[1]:
        logits, state = program.read(state, spoken[-1][:, None].astype(np.int32), write=False)
        spoken.append(np.argmax(logits[:, -1], axis=-1))
    return np.stack(spoken, axis=1), np.concatenate(given, axis=1)


def other_paths(subject: Subject, questions: Questions) -> Line:
    """The line of paths past the memory: with caches empty and writing disabled, none may be left.

    The texts' values are changed; no logits of the last question may then move in any bit.

    Raises:
      ValueError: the memory adds zero to the logits, as one that was put into a model and not
        trained yet, so that no answer can come from it.
    """
    program = ModelProgram(subject.model, subject.first_memory)

    def logits(write: bool) -> list[np.ndarray]:
        return [
            last_logits(program, questions, texts, write=write)
            for texts in (questions.texts, questions.others)
        ]

    written = logits(write=True)
    seen = bool(differences(*written))
    if not seen:
        bare = ModelProgram(without_memory_layers(subject.model), {})
        without = last_logits(bare, questions, questions.texts, write=False)
        if not differences(without, written[0]):
            raise ValueError("the memory adds zero to the logits, so no answer can come from it.")
    return covers("paths past the memory", *logits(write=False), seen=seen)


def last_logits(
    program: ModelProgram,
    questions: Questions,
    texts: np.ndarray,
    *,
    write: bool,
    keep_caches: bool = False,
) -> np.ndarray:
    """Logits of the last question about each text."""
    state = read_texts(program, texts, write=write)
    state = state if keep_caches else program.restart(state)
    return ask(program, state, [asked[-1] for asked in questions.questions], questions)[1]


def covers(name: str, logits: np.ndarray, others: np.ndarray, *, seen: bool = True) -> Line:
    """The line of a question that is asked where the memory was not written.

    Args:
      name: of what is asked.
      logits: of the questions, `[questions, ...]`.
      others: the same after a text that states other values.
      seen: whether those values move the logits once they are written, as they must.
    """
    moved = np.any(np.reshape(np.asarray(logits) != np.asarray(others), (len(logits), -1)), axis=1)
    if not seen:
        text = "Other values move no question even when they are written: it cannot fail."
    elif not moved.any():
        text = "With the memory frozen, other values in the text move no bit of any question."
    else:
        largest = difference_of(np.asarray(others), np.asarray(logits))
        text = (
            f"With the memory frozen, other values in the text move {int(moved.sum())} of "
            f"{len(moved)} questions by up to {largest:.2g}: a window, a convolution or a "
            "cache covers the needle, and its answers are not the memory's."
        )
    return Line(
        section="origin",
        name=name,
        verdict=judged(seen and not moved.any()),
        text=text,
        numbers={"moved": int(moved.sum()), "questions": len(moved)},
    )


def _states(program: ModelProgram, questions: Questions) -> Iterator[tuple[str, Stream]]:
    """The state in which each condition asks."""
    written = read_texts(program, questions.texts, write=True)
    yield "written, caches kept", written
    other = read_texts(program, questions.others, write=True)
    yield "not stated", program.restart(other) if program.initial else other
    if not program.initial:
        return
    emptied = program.restart(written)
    yield "written", emptied
    yield "reset", emptied._replace(memory=for_rows(program.initial, len(questions.texts)))
    swapped = map_unshared(lambda x: jnp.roll(x, 1, axis=0), emptied.memory)
    yield "other memory", emptied._replace(memory=swapped)
    if program.model.config.fast_weight.rule.num_slots is not None:
        none = {
            name: one._replace(values=jnp.zeros_like(one.values))
            for name, one in emptied.memory.items()
        }
        yield "without reads", emptied._replace(memory=none)
    frozen = read_texts(program, questions.texts, write=False)
    yield "frozen, caches kept", frozen
    yield "frozen", program.restart(frozen)


def read_texts(program: ModelProgram, texts: np.ndarray, *, write: bool) -> Stream:
    """The state behind the texts `[texts, length]`, each read into a memory of its own."""
    rows, length = texts.shape
    # Room for question and answer, which full attention keeps, too.
    state = program.start(rows, 2 * length + 256)
    for start in range(0, length, _PIECE):
        _, state = program.read(state, texts[:, start : start + _PIECE], write=write)
    return state


def is_written(model: ModelConfig, end: int, length: int) -> bool:
    """Whether tokens up to `end` were written before the end of a text."""
    if not model.memory_layers:
        return True
    config = model.fast_weight
    writes = max(0, length - config.rule.lookahead) // config.chunk_size
    return end <= writes * config.chunk_size


def _told(tokens: np.ndarray, tokenizer: Tokenizer | None) -> str:
    """A value's tokens as text; of generated data their numbers."""
    if tokenizer is None:
        return " ".join(str(int(token)) for token in tokens)
    return tokenizer.decode([int(token) for token in tokens if token >= 0])
