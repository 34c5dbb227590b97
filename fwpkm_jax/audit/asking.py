"""Asks a `LanguageModel` under every condition: written, frozen, reset, with another memory."""

from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax

from fwpkm_jax.audit.lines import Line, difference_of, differences, judged
from fwpkm_jax.audit.origin import Answer
from fwpkm_jax.audit.paths import ModelProgram, for_rows
from fwpkm_jax.audit.questions import Question, Questions
from fwpkm_jax.core.chunks import map_unshared
from fwpkm_jax.data import load_tokenizer
from fwpkm_jax.evaluation.interface import Subject
from fwpkm_jax.evaluation.recall import attention_reach
from fwpkm_jax.evaluation.reconfigure import without_memory_layers
from fwpkm_jax.models.language_model import LanguageModel, Stream

_PIECE = 256  # Tokens of a text that are read in one call, whose logits are not kept.


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
    decode = _decoder(subject)
    length = questions.texts.shape[1]
    records = []
    for condition, state in _states(program, questions):
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
                        reach=attention_reach(subject.model.config).stack,
                        written=_is_written(subject.model, one.stated + len(one.answer), length),
                        expected=decode(one.answer),
                        answer=decode(spoken[document]),
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
    program: ModelProgram, state: Stream, row: Sequence[Question], questions: Questions
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


def _is_written(model: LanguageModel, end: int, length: int) -> bool:
    """Whether tokens up to `end` were written before the end of a text."""
    if not model.config.memory_layers:
        return True
    config = model.config.fast_weight
    writes = max(0, length - config.rule.lookahead) // config.chunk_size
    return end <= writes * config.chunk_size


def _decoder(subject: Subject) -> Callable[[np.ndarray], str]:
    """A value's tokens as text; of generated data their numbers."""
    if subject.data is not None and subject.data.text is not None:
        tokenizer = load_tokenizer(subject.data.text.tokenizer)
        return lambda tokens: tokenizer.decode([int(token) for token in tokens if token >= 0])
    return lambda tokens: " ".join(str(int(token)) for token in tokens)
