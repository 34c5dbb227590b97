"""Storage, addressing and readout of answers apart, by the slot trace.

Stored: a slot was last written by the token before the value's. Addressed: of the weight that the
question reads, the share in such slots. Read out: the value's token is the likeliest.
"""

from __future__ import annotations

import numpy as np

from fwpkm_jax.audit.lines import Line
from fwpkm_jax.audit.questions import Question, Questions
from fwpkm_jax.evaluation.interface import Subject
from fwpkm_jax.evaluation.readers.stream_reader import StreamReader
from fwpkm_jax.evaluation.readers.tracing_reader import TracingReader

_TEXTS = 4  # That are traced, each by a reader of its own.


def traced(subject: Subject, questions: Questions) -> Line:
    """The line of storage, addressing and readout, over the first texts.

    Each text is written in the model's own chunks. Before its questions all caches are emptied, and
    the value's tokens are given one after the other, so that each is judged by itself.

    Raises:
      ValueError: the model's memories have no slots.
    """
    model = subject.model
    rule = model.config.fast_weight.rule
    if not model.config.memory_layers or rule.num_slots is None:
        raise ValueError("the model has no fast-weight memory with slots to trace.")
    chunk, length = model.config.fast_weight.chunk_size, questions.texts.shape[1]
    longest = max(len(q.tokens) + len(q.answer) for asked in questions.questions for q in asked)
    stream = StreamReader(
        model,
        subject.first_memory,
        write=True,
        chunk_size="flush",
        capacity=chunk + longest + 1,
        piece_length=chunk,
        max_length=length + longest,
    )
    reader = TracingReader(stream, rule)
    stored: list[bool] = []
    addressed: list[float] = []
    right: list[bool] = []
    shown = min(_TEXTS, len(questions.texts))
    for text, asked in zip(questions.texts[:shown], questions.questions, strict=False):
        reader.reset_memory()
        begun = len(reader.tokens)  # Positions count on from text to text.
        _write(reader, text, chunk=chunk, lookahead=rule.lookahead)
        for question in asked:
            stream.restart(drop_queue=True)
            reader.read(question.tokens)
            found = _follow(reader, question, first=begun + question.stated - rule.lookahead)
            stored += found[0]
            addressed += found[1]
            right += found[2]
    share, weight, readout = map(float, map(np.mean, (stored, addressed, right)))
    good = np.array(stored) & (np.array(addressed) > 0)
    return Line(
        section="origin",
        name="storage, addressing, readout",
        verdict="told",
        text=(
            f"Of {len(stored)} tokens of values, {share:.3f} are the last that wrote some slot; "
            f"{weight:.3f} of what questions read is such slots; {readout:.3f} are read out right"
            f" ({_mean(np.array(right)[good])} where stored and addressed)."
        ),
        numbers={
            "stored": share,
            "addressed": weight,
            "read_out": readout,
            "tokens": len(stored),
            "texts": shown,
        },
    )


def _mean(values: np.ndarray) -> str:
    return f"{values.mean():.3f}" if values.size else "none"


def _write(reader: TracingReader, text: np.ndarray, *, chunk: int, lookahead: int) -> None:
    """Reads a text and writes it as a stream does: a chunk once its targets are there."""
    start, end = 0, chunk + lookahead
    while end <= len(text):
        reader.read(text[start:end])
        reader.write()
        start, end = end, end + chunk
    if start < len(text):
        reader.read(text[start:])


def _follow(
    reader: TracingReader, question: Question, *, first: int
) -> tuple[list[bool], list[float], list[bool]]:
    """For each token of a value: is it stored, what weight reads it, and is it the likeliest.

    `first` is the position of the token that writes the value's first one.
    """
    stored, addressed, right = [], [], []
    for place, token in enumerate(question.answer):
        writer = first + place
        likeliest = reader.next_token()
        reads = reader.reads[-1]
        stored.append(any(bool(np.any(log.position == writer)) for log in reader.logs.values()))
        weights = [
            sum(one.weight for one in read.slots if one.entry and one.entry.position == writer)
            / max(sum(one.weight for one in read.slots), 1e-9)
            for read in reads.values()
        ]
        addressed.append(max(weights))
        right.append(likeliest == int(token))
        if place + 1 < len(question.answer):
            reader.read(question.answer[place : place + 1])
    return stored, addressed, right
