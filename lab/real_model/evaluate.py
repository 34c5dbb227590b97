"""Asks a run what sessions told it: exact answers with the memory written, not written, and others.

    python -m lab.real_model.evaluate --run RUN --sessions FILE [--base BASE] [--book FILE]

FILE holds sessions as `fwpkm_jax.data.sessions` reads them. All rows of a session but the last are
told; the answers of its last row are asked. An answer is exact if each of its tokens is the
model's most likely one behind the question and the tokens before it.
"""

import copy
import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.options import parse
from fwpkm_jax.data.sessions import SessionRow, read_sessions
from fwpkm_jax.data.streams.files import data_files
from fwpkm_jax.data.tokenizers import Tokenizer, load_tokenizer
from fwpkm_jax.models.block import ForwardContext
from fwpkm_jax.run.load import Run, load_run
from fwpkm_jax.storage.compile_cache import use_compile_cache
from fwpkm_jax.training.state import model_graph

_BATCH = 4
_MULTIPLE = 128  # Lengths, so that few programs are compiled.
_OTHERS = 6  # Sessions of eight to ten facts: fifty facts.
_BOOK, _PIECE = 2000, 500


@dataclass(frozen=True, kw_only=True)
class Options:
    """Asks a run what sessions told it."""

    run: Path
    """Directory of the run."""
    sessions: Path
    """Sessions, JSON lines."""
    base: Path | None = None
    """Run of the model alone, asked with all in its context."""
    book: Path | None = None
    """Text of which 2,000 tokens are read between."""
    few: int = 0
    """Sessions of the longer conditions (told twice, other facts, the book); 0: none of these."""
    out: Path | None = None
    """JSON lines, to which the shares are added."""


def padded(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows `[rows, length, ...]` and the mask of real places, int32 `[rows, length]`."""
    length = -(-max(map(len, rows)) // _MULTIPLE) * _MULTIPLE
    whole = np.zeros((len(rows), length, *rows[0].shape[1:]), rows[0].dtype)
    mask = np.zeros((len(rows), length), np.int32)
    for number, row in enumerate(rows):
        whole[number, : len(row)], mask[number, : len(row)] = row, 1
    return whole, mask


class Asked:
    """A run's model, which reads rows and answers.

    What lies under the first memory does not depend on it, so it is computed once for each row.
    """

    def __init__(self, run: Run) -> None:
        self._config, self._graphdef, self._params = run.experiment.model, run.graphdef, run.params
        self._under: dict[bytes, np.ndarray] = {}
        self._start = {name: jax.tree.map(lambda x: x[:1], one) for name, one in run.memory.items()}

    def without_retention(self) -> "Asked":
        """The same model, whose writes do not spare what slots hold."""
        other = copy.copy(self)
        rule = dataclasses.replace(self._config.fast_weight.rule, retention=None)
        weights = dataclasses.replace(self._config.fast_weight, rule=rule)
        other._graphdef = model_graph(dataclasses.replace(self._config, fast_weight=weights))
        other._start = {name: one._replace(history=None) for name, one in self._start.items()}
        return other

    def start(self, sessions: int) -> dict:
        """Memories of sessions that were told nothing."""
        return {
            name: jax.tree.map(lambda x: jnp.repeat(x, sessions, axis=0), one)
            for name, one in self._start.items()
        }

    def read(self, memory: dict, rows: Sequence[np.ndarray]) -> dict:
        """The memories after each has read its row."""
        return self._read(self._params, memory, *padded(self._below(rows)))

    def said(self, memory: dict, rows: Sequence[SessionRow]) -> list[list[np.ndarray]]:
        """Of each session the most likely tokens where its answers stand; nothing is written."""
        places = [
            [place - 1 for x in row.answers for place in range(x.start, x.start + len(x.tokens))]
            for row in rows
        ]
        asked = padded([np.array(one, np.int32) for one in places])[0]
        hidden = padded(self._below([row.tokens for row in rows]))
        best = np.asarray(self._best(self._params, memory, *hidden, asked))
        ends = [np.cumsum([len(x.tokens) for x in row.answers]) for row in rows]
        return [np.split(one[: end[-1]], end[:-1]) for one, end in zip(best, ends, strict=True)]

    def losses(self, memory: dict, rows: Sequence[np.ndarray]) -> list[float]:
        """Of each row the mean loss of its tokens; nothing is written."""
        hidden, (tokens, _) = padded(self._below(rows)), padded(rows)
        return np.asarray(self._loss(self._params, memory, *hidden, tokens)).tolist()

    def _below(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The residual stream under the first memory, `[length, model]` of each row."""
        new = {row.tobytes(): row for row in rows if row.tobytes() not in self._under}
        if new:
            tokens, mask = padded([*new.values()])
            for (name, row), one in zip(
                new.items(), np.asarray(self._embed(self._params, tokens, mask)), strict=True
            ):
                self._under[name] = one[: len(row)]
        return [self._under[row.tobytes()] for row in rows]

    def _layers(self, params, memory, x, mask, layers: slice, *, write: bool = True):
        model, written = nnx.merge(self._graphdef, params), {}
        context = ForwardContext(mask=mask, real=mask, write=write)
        for name, block in [*zip(model.layer_names, model.blocks, strict=True)][layers]:
            out = block(x, memory.get(name), context)
            x, written[name] = out.x, out.memory
        return model, x, {name: written[name] for name in memory if name in written}

    @property
    def _first(self) -> int:
        return min(self._config.memory_layers, default=0)

    @functools.partial(jax.jit, static_argnums=0)
    def _embed(self, params, tokens, mask):
        x = nnx.merge(self._graphdef, params)._embed(tokens, None)
        return self._layers(params, {}, x, mask, slice(self._first))[1]

    @functools.partial(jax.jit, static_argnums=0)
    def _read(self, params, memory, x, mask):
        return self._layers(params, memory, x, mask, slice(self._first, None))[2]

    @functools.partial(jax.jit, static_argnums=0)
    def _best(self, params, memory, x, mask, places):
        layers = slice(self._first, None)
        model, x, _ = self._layers(params, memory, x, mask, layers, write=False)
        x = jnp.take_along_axis(model.final_norm(x), places[..., None], axis=1)
        return jnp.argmax(model.logits(x), axis=-1)

    @functools.partial(jax.jit, static_argnums=0)
    def _loss(self, params, memory, x, mask, tokens):
        layers = slice(self._first, None)
        model, x, _ = self._layers(params, memory, x, mask, layers, write=False)
        logits, weights = model.logits(model.final_norm(x))[:, :-1], mask[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.sum(losses * weights, axis=1) / jnp.sum(weights, axis=1)


def share(right: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """Share of true ones, and half the width of its 95 % interval over sessions."""
    asked = np.array([len(one) for one in right])
    exact = np.array([sum(one) for one in right])
    mean = exact.sum() / asked.sum()
    # A ratio of sums: the sessions' residuals give its deviation.
    deviation = np.std(exact - mean * asked, ddof=1) / asked.mean() / math.sqrt(len(right))
    return round(float(mean), 4), round(1.96 * float(deviation), 4)


def ask(
    asked: Asked,
    sessions: Sequence[list[SessionRow]],
    *,
    times: int = 1,
    between: Sequence[np.ndarray] = (),
    others: int = 0,
) -> dict[str, float | int]:
    """The share of exact answers when all rows but the last have been told.

    Args:
      asked: the model.
      sessions: of which the last row asks.
      times: how often it is told; 0: it is not told, and what stands between is read alone.
      between: rows that are read after those of the session.
      others: of so many other sessions the told rows are read after them.

    Returns:
      The share, half the width of its 95 % interval over sessions, and counts.
    """
    right = []
    for first in range(0, len(sessions), _BATCH):
        some = sessions[first : first + _BATCH]
        memory = asked.start(len(some))
        told = [[row.tokens for row in rows[:-1]] * times for rows in some]
        for number, rows in enumerate(told):
            for step in range(1, others + 1):
                rest = sessions[(first + number + step) % len(sessions)]
                rows += [row.tokens for row in rest[:-1]]
            rows += between
        for number in range(max(map(len, told))):
            # A session without a further row reads padding.
            memory = asked.read(
                memory,
                [rows[number] if number < len(rows) else rows[0][:0] for rows in told],
            )
        for rows, said in zip(some, asked.said(memory, [rows[-1] for rows in some]), strict=True):
            answers = [x.tokens for x in rows[-1].answers]
            right.append([*map(np.array_equal, said, answers)])
    exact, interval = share(right)
    return {
        "exact": exact,
        "interval": interval,
        "answers": sum(map(len, right)),
        "of_sessions": len(right),
    }


def in_context(sessions: Sequence[list[SessionRow]]) -> list[list[SessionRow]]:
    """The sessions with all rows joined into the one that asks."""
    joined = []
    for rows in sessions:
        before = np.concatenate([row.tokens for row in rows[:-1]])
        last = rows[-1]
        answers = [x._replace(start=x.start + len(before)) for x in last.answers]
        joined.append([SessionRow(np.concatenate([before, last.tokens]), answers)])
    return joined


def sessions_of(path: Path, tokenizer: Tokenizer) -> list[list[SessionRow]]:
    """The sessions of a file."""
    return list(read_sessions(data_files(str(path)), tokenizer))


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv)
    use_compile_cache()
    run = load_run(options.run)
    tokenizer = load_tokenizer(run.experiment.data.text.tokenizer)
    sessions = sessions_of(options.sessions, tokenizer)
    few, asked = sessions[: options.few], Asked(run)

    def say(condition: str, found: dict) -> None:
        name = options.sessions.stem
        line = {"what": "asked", "sessions": name, "condition": condition, **found}
        print(json.dumps(line), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    between: dict[str, dict[str, Any]] = {
        "told twice": {"times": 2},
        "after fifty other facts": {"others": _OTHERS},
    }
    if options.book is not None:
        book = tokenizer.encode(options.book.read_text())[:_BOOK]
        if len(book) < _BOOK:
            raise ValueError(f"{options.book} has {len(book)} tokens; name a text of 2,000.")
        pieces = np.split(book, range(_PIECE, _BOOK, _PIECE))
        between["after 2,000 tokens of a book"] = {"between": pieces}
    say("not written", ask(asked, sessions, times=0))
    for one, end in (asked, ""), (asked.without_retention(), ", without the write that keeps"):
        say(f"written{end}", ask(one, sessions))
        for condition, settings in between.items() if few else ():
            say(condition + end, ask(one, few, **settings))
            if not end and "times" not in settings:
                say(f"{condition}, not told", ask(one, few, times=0, **settings))
    if few:
        say("told once (the same few sessions)", ask(asked, few))
    if options.base is not None:
        base = Asked(load_run(options.base))
        say("the base, all in its context", ask(base, in_context(sessions), times=0))


if __name__ == "__main__":
    main()
