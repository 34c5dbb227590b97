"""Whether writing stays stable: the loss behind the first write, and a long text."""

from collections.abc import Iterator

import numpy as np
from scipy.special import log_softmax

from fwpkm_jax.audit.design import ROUNDING, Noise, other_tokens
from fwpkm_jax.audit.lines import Line, difference_of, judged
from fwpkm_jax.audit.paths import ModelProgram
from fwpkm_jax.audit.program import Program, in_pieces
from fwpkm_jax.evaluation.interface import Subject
from fwpkm_jax.evaluation.sources import text_sources

WORSE = 0.5
"""Nats by which the loss behind the first write may exceed that of a frozen memory."""
_ROWS = 4  # Texts that are read side by side for the first write.
_PIECE = 512  # Tokens of the long text that are read in one call.
_LATE = 8  # Positions of the long text from which on another text is read.


def stability(subject: Subject, *, tokens: int) -> Iterator[Line]:
    """The lines of the first write's effect and of a long text.

    Args:
      subject: the model, its memory and the data it reads.
      tokens: length of the long text.
    """
    program = ModelProgram(subject.model, subject.first_memory)
    fast_weight = subject.model.config.fast_weight
    begin = fast_weight.chunk_size + fast_weight.rule.lookahead
    size = begin + fast_weight.chunk_size  # Up to the second write.
    count = max(tokens, _ROWS * size) + 1
    text = np.fromiter(_tokens(subject, most=count), np.int32, count=count)
    if subject.memory:
        rows = text[: _ROWS * size].reshape(_ROWS, size)
        written, frozen = (
            _losses(in_pieces(one, piece=begin)(rows)["logits"][:, begin:-1], rows[:, begin + 1 :])
            for one in (program, ModelProgram(program.model, program.initial, writes=False))
        )
        yield first_write(written, frozen)
    yield from long_text(program, text[: tokens + 1], rounding=program.rounding)


def first_write(written: np.ndarray, frozen: np.ndarray) -> Line:
    """The line of the loss behind the first write, of any program.

    Args:
      written: losses in nats of the tokens between the first write and the second.
      frozen: those of the same tokens without any write.
    """
    ours, theirs = float(np.mean(written)), float(np.mean(frozen))
    good = bool(np.isfinite(ours)) and ours - theirs <= WORSE
    text = (
        f"The loss behind the first write is {ours:.3f} nats, {ours - theirs:+.3f} against a "
        f"frozen memory over {written.size} tokens (allowed {WORSE:+.2f})"
    )
    text += "." if good else ": writing destroys what the model knows."
    return Line(
        section="stability",
        name="first write",
        verdict=judged(good),
        text=text,
        numbers={
            "written": ours if np.isfinite(ours) else None,
            "frozen": theirs if np.isfinite(theirs) else None,
            "tokens": int(written.size),
            "allowed": WORSE,
        },
    )


def _tokens(subject: Subject, *, most: int) -> Iterator[int]:
    """Tokens of the validation data again and again; random ones if there are no data.

    Of no document more than `most` are read.
    """
    vocab_size, data = subject.model.config.vocab_size, subject.data
    rng = np.random.default_rng(subject.seed)
    while True:
        if data is None:
            yield from rng.integers(vocab_size, size=4096).tolist()
        elif data.text is not None:
            for source in text_sources(data.text):
                for document in source.documents(most_tokens=most):
                    yield from document.tokens.tolist()
        else:
            source = data.source(split="valid", seed=subject.seed)
            for number in range(len(source)):
                yield from source[number]["tokens"].tolist()


def long_text(
    program: Program, text: np.ndarray, *, rounding: float = ROUNDING, exact: bool = True
) -> tuple[Line, Line]:
    """The lines of a long text, read by one stream: all stays finite, and late tokens are causal.

    Some pieces are read again, with another text from a position on.

    Args:
      program: see `Program`.
      text: ids `[length + 1]`, read in pieces.
      rounding: see `causality`.
      exact: see `causality`.
    """
    piece = min(_PIECE, len(text) - 1)
    count = (len(text) - 1) // piece
    state = program.start(1, piece)
    looked = np.linspace(piece // 4, count * piece - 1, _LATE).astype(int).tolist()
    losses, ahead = np.zeros(count), []
    for number in range(count):
        start = number * piece
        part = text[start : start + piece + 1][None]
        tokens, before = part[:, :-1], state
        logits, state = program.read(before, tokens, write=True)
        losses[number] = _losses(logits, part[:, 1:]).mean()
        others = other_tokens(tokens, program.vocab_size)
        for place in (one - start for one in looked if start <= one < start + piece):
            changed = np.where(np.arange(tokens.shape[1]) >= place, others, tokens)
            other, again = (program.read(before, x, write=True)[0] for x in (changed, tokens))
            noise = Noise.of(logits, again, rounding, exact=exact)
            moved = difference_of(logits[:, :place], other[:, :place])
            if moved > noise.allowed or noise.refusal():
                ahead.append((moved, start + place))
    bad = np.flatnonzero(~np.isfinite(losses))
    good = not bad.size
    tenth = max(1, count // 10)
    first, last = float(losses[:tenth].mean()), float(losses[-tenth:].mean())
    finite = Line(
        section="stability",
        name="a long text",
        verdict=judged(good),
        text=(
            f"All losses over {count * piece:,} tokens are finite; {first:.3f} nats in the first "
            f"tenth, {last:.3f} in the last."
            if good
            else f"Not finite from token {int(bad[0]) * piece:,} on."
        ),
        numbers={"tokens": count * piece}
        | ({"first_tenth": first, "last_tenth": last} if good else {}),
    )
    text_of = (
        f"Another text from token {max(ahead)[1]:,} on moves logits before it by "
        f"{max(ahead)[0]:.2g}: the model sees ahead, or equal calls differ."
        if ahead
        else f"Another text from each of {_LATE} tokens on, the last of them token "
        f"{looked[-1]:,}, moves no logits before it."
    )
    late = Line(
        section="causality",
        name="late in a long text",
        verdict=judged(not ahead),
        text=text_of,
        numbers={"positions": looked, "ahead": [place for _, place in ahead]},
    )
    return finite, late


def _losses(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Each label's loss in nats, from logits `[rows, length, vocab]`."""
    log_probs = log_softmax(logits, axis=-1)
    return -np.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
