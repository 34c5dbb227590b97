"""Whether writing stays stable: sizes of writes, the loss behind the first one, a long text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.audit.lines import Line, judged
from fwpkm_jax.audit.paths import for_rows
from fwpkm_jax.core.chunks import take_shared
from fwpkm_jax.evaluation.interface import Subject
from fwpkm_jax.evaluation.readers.stream_reader import label_losses
from fwpkm_jax.evaluation.sources import text_sources
from fwpkm_jax.models.language_model import LanguageModel, Memory, Stream

WORSE = 0.5
"""Nats by which the loss behind the first write may exceed that of a frozen memory."""
_ROWS = 4  # Texts that are read side by side for the sizes of writes.
_CHUNKS = 4  # Chunks of each.


def stability(subject: Subject, *, tokens: int) -> list[Line]:
    """The lines of writes, of the first one's effect, and of a long text.

    Args:
      subject: the model, its memory and the data it reads.
      tokens: length of the long text.
    """
    if not subject.memory:
        return [
            Line(
                section="stability",
                name="writes",
                verdict="skipped",
                text="The model has no memory layers, so nothing is written.",
            )
        ]
    chunk = subject.model.config.fast_weight.chunk_size
    lookahead = subject.model.config.fast_weight.rule.lookahead
    size = _CHUNKS * chunk + lookahead
    text = np.fromiter(_tokens(subject), np.int32, count=max(tokens, _ROWS * size) + 1)
    rows = text[: _ROWS * size].reshape(_ROWS, size)
    return [*_writes(subject.model, subject.first_memory, rows), _long(subject, text[: tokens + 1])]


def first_write(
    written: np.ndarray, frozen: np.ndarray, *, allowed: float = WORSE, name: str = "first write"
) -> Line:
    """The line of the loss behind the first write, of any program.

    Args:
      written: losses in nats of the tokens between the first write and the second.
      frozen: those of the same tokens without any write.
      allowed: nats by which writing may be worse.
      name: of what was read.
    """
    ours, theirs = float(np.mean(written)), float(np.mean(frozen))
    good = bool(np.isfinite(ours)) and ours - theirs <= allowed
    text = (
        f"The loss behind the first write is {ours:.3f} nats, {ours - theirs:+.3f} against a "
        f"frozen memory over {written.size} tokens (allowed {allowed:+.2f})"
    )
    text += "." if good else ": writing destroys what the model knows."
    return Line(
        section="stability",
        name=name,
        verdict=judged(good),
        text=text,
        numbers={
            "written": ours if np.isfinite(ours) else None,
            "frozen": theirs if np.isfinite(theirs) else None,
            "tokens": int(written.size),
            "allowed": allowed,
        },
    )


def _tokens(subject: Subject) -> Iterator[int]:
    """Tokens of the validation data again and again; random ones if there are no data."""
    vocab_size, data = subject.model.config.vocab_size, subject.data
    rng = np.random.default_rng(subject.seed)
    while True:
        if data is None:
            yield from rng.integers(vocab_size, size=4096).tolist()
        elif data.text is not None:
            for source in text_sources(data.text):
                for document in source.documents():
                    yield from document.tokens.tolist()
        else:
            source = data.source(split="valid", seed=subject.seed)
            for number in range(len(source)):
                yield from source[number]["tokens"].tolist()


def _writes(model: LanguageModel, memory: Memory, rows: np.ndarray) -> list[Line]:
    """Norm of each write over the norm held before it, and the loss behind the first write."""
    fast_weight = model.config.fast_weight
    chunk, lookahead = fast_weight.chunk_size, fast_weight.rule.lookahead
    graphdef, params = nnx.split(model)
    start = for_rows(memory, len(rows))
    losses, ratios = {}, []
    for write in (True, False):
        stream = model.init_stream(
            jax.tree.map(jnp.copy, start), batch=len(rows), max_length=rows.shape[1]
        )
        found = []
        # The first piece holds the lookahead, too; with its last token a chunk is written.
        cuts = [0, *range(chunk + lookahead, rows.shape[1] + 1, chunk)]
        for begin, end in itertools.pairwise(cuts):
            part = rows[:, begin : end + 1]
            if part.shape[1] == end - begin:  # The last piece has no label behind it.
                break
            loss, stream, ratio = _read(graphdef, params, stream, part, write=write)
            found.append(np.asarray(loss))
            if write:
                ratios.append(np.asarray(ratio))
        losses[write] = found
    ratio = np.stack(ratios)  # [writes, arrays]
    finite = bool(np.isfinite(ratio).all())
    worst = float(np.max(ratio)) if finite else None
    text = (
        f"Norm written over norm held: {float(np.median(ratio)):.2g} in the median and "
        f"{worst:.2g} at most, over {len(ratios)} writes of {len(rows)} texts and all arrays."
        if finite
        else "A write is not finite."
    )
    writes = Line(
        section="stability",
        name="writes",
        verdict="told" if finite else "fail",
        text=text,
        numbers={"median": float(np.median(ratio)) if finite else None, "largest": worst}
        | _constants(model),
    )
    return [writes, first_write(losses[True][1], losses[False][1])]


def _constants(model: LanguageModel) -> dict[str, Any]:
    """The constants of the write: the rule's fields."""
    rule = model.config.fast_weight.rule
    kinds = int | float | str
    known = {name: value for name, value in vars(rule).items() if isinstance(value, kinds)}
    return {"chunk_size": model.config.fast_weight.chunk_size, "rule": type(rule).__name__, **known}


@partial(jax.jit, static_argnames=("graphdef", "write"), donate_argnames="stream")
def _read(
    graphdef: Any, params: Any, stream: Stream, tokens: jax.Array, *, write: bool
) -> tuple[jax.Array, Stream, jax.Array]:
    """Losses `[batch, piece]`, the stream behind the piece, and the size of its write by array."""
    out = nnx.merge(graphdef, params).stream(tokens[:, :-1], stream, write=write)
    losses = label_losses(out.logits, tokens[:, 1:])
    return losses, out.stream, _sizes(stream.memory, out.stream.memory)


def _sizes(before: Memory, after: Memory) -> jax.Array:
    """Norm of what was written over the norm held before, by floating-point array."""
    pairs = zip(
        jax.tree.leaves(take_shared(before)[0]), jax.tree.leaves(take_shared(after)[0]), strict=True
    )
    ratios = [
        jnp.linalg.norm(new - old) / jnp.maximum(jnp.linalg.norm(old), 1e-9)
        for old, new in pairs
        if jnp.issubdtype(old.dtype, jnp.floating)
    ]
    return jnp.stack(ratios)


def _long(subject: Subject, text: np.ndarray) -> Line:
    """The line of a long text, read by one stream: every loss and the memory stay finite."""
    model, memory = subject.model, subject.first_memory
    graphdef, params = nnx.split(model)
    piece = max(512, model.config.fast_weight.chunk_size)
    count = max(1, (len(text) - 1) // piece)
    stream = model.init_stream(jax.tree.map(jnp.copy, memory), batch=1, max_length=piece)
    held = _norm(stream.memory)
    means = []
    for number in range(count):
        part = text[number * piece : (number + 1) * piece + 1][None]
        losses, stream, _ = _read(graphdef, params, stream, part, write=True)
        means.append(jnp.mean(losses))
    losses = np.asarray(jnp.stack(means))
    bad = np.flatnonzero(~np.isfinite(losses))
    grown = float(_norm(stream.memory)) / max(float(held), 1e-9)
    good = not bad.size and bool(np.isfinite(grown))
    tenth = max(1, count // 10)
    first, last = float(losses[:tenth].mean()), float(losses[-tenth:].mean())
    text_of = (
        f"All losses over {losses.size * piece:,} tokens are finite; {first:.3f} nats in the first "
        f"tenth, {last:.3f} in the last; the memory's norm is {grown:.2f} times its first."
        if good
        else f"Not finite from token {int(bad[0]) * piece if bad.size else count * piece:,} on."
    )
    return Line(
        section="stability",
        name="a long text",
        verdict=judged(good),
        text=text_of,
        numbers={"tokens": count * piece}
        | ({"first_tenth": first, "last_tenth": last, "norm": grown} if good else {}),
    )


@jax.jit
def _norm(memory: Memory) -> jax.Array:
    leaves = jax.tree.leaves(take_shared(memory)[0])
    floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in floats))
