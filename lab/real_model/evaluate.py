"""Asks a run what sessions told it: exact answers with the memory written, not written, and others.

    python -m lab.real_model.evaluate --run RUN --sessions FILE [--base BASE] [--book FILE]

FILE holds sessions as `fwpkm_jax.data.sessions` reads them. All rows of a session but the last are
told; the answers of its last row are asked. An answer is exact if each of its tokens is the
model's most likely one behind the question and the tokens before it.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.options import parse
from fwpkm_jax.data.sessions import SessionRow, read_sessions
from fwpkm_jax.data.streams.files import data_files
from fwpkm_jax.data.tokenizers import load_tokenizer
from fwpkm_jax.run.load import Run, load_run
from fwpkm_jax.training.state import model_graph

_BATCH = 4
_MULTIPLE = 64  # Lengths, so that few programs are compiled.


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
    few: int = 16
    """Sessions of the longer conditions."""
    out: Path | None = None
    """JSON lines, to which the shares are added."""


def padded(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 `[rows, length]` and the mask of real ones."""
    length = -(-max(map(len, rows)) // _MULTIPLE) * _MULTIPLE
    tokens = np.zeros((len(rows), length), np.int32)
    mask = np.zeros((len(rows), length), np.int32)
    for number, row in enumerate(rows):
        tokens[number, : len(row)], mask[number, : len(row)] = row, 1
    return tokens, mask


class Asked:
    """A run's model, which reads rows and answers.

    Args:
      run: with or without a memory.
      retention: whether writes spare what slots hold; None: as the run says.
    """

    def __init__(self, run: Run, *, retention: bool | None = None) -> None:
        graphdef, memory = run.graphdef, run.memory
        if retention is False:
            config = run.experiment.model
            rule = dataclasses.replace(config.fast_weight.rule, retention=None)
            weights = dataclasses.replace(config.fast_weight, rule=rule)
            graphdef = model_graph(dataclasses.replace(config, fast_weight=weights))
            memory = {name: one._replace(history=None) for name, one in memory.items()}
        self._graphdef, self._params = graphdef, run.params
        self._start = {name: jax.tree.map(lambda x: x[:1], one) for name, one in memory.items()}

    def start(self, sessions: int) -> dict:
        """Memories of sessions that were told nothing."""
        return {
            name: jax.tree.map(lambda x: jnp.repeat(x, sessions, axis=0), one)
            for name, one in self._start.items()
        }

    def read(self, memory: dict, rows: Sequence[np.ndarray]) -> dict:
        """The memories after each has read its row."""
        tokens, mask = padded(rows)
        return self._read(self._params, memory, tokens, mask)

    def right(self, memory: dict, rows: Sequence[SessionRow]) -> list[list[bool]]:
        """Of each session, which answers are exact."""
        tokens, mask = padded([row.tokens for row in rows])
        best = np.asarray(self._best(self._params, memory, tokens, mask))
        return [
            [
                np.array_equal(said[x.start - 1 : x.start - 1 + len(x.tokens)], x.tokens)
                for x in row.answers
            ]
            for row, said in zip(rows, best, strict=True)
        ]

    @functools.partial(jax.jit, static_argnums=0)
    def _read(self, params, memory, tokens, mask):
        model = nnx.merge(self._graphdef, params)
        return model.hidden(tokens, memory, mask=mask).memory

    @functools.partial(jax.jit, static_argnums=0)
    def _best(self, params, memory, tokens, mask):
        model = nnx.merge(self._graphdef, params)
        hidden = model.hidden(tokens, memory, mask=mask, write=False)
        return jnp.argmax(model.logits(hidden.x), axis=-1)


def share(right: Sequence[Sequence[bool]]) -> dict[str, float | int]:
    """Share of exact answers, with half the width of a 95 % interval over sessions."""
    asked = np.array([len(one) for one in right])
    exact = np.array([sum(one) for one in right])
    mean = exact.sum() / asked.sum()
    # A ratio of sums: the sessions' residuals give its deviation.
    deviation = np.std(exact - mean * asked, ddof=1) / asked.mean() / math.sqrt(len(right))
    return {
        "exact": round(float(mean), 4),
        "interval": round(1.96 * float(deviation), 4),
        "answers": int(asked.sum()),
        "sessions": len(right),
    }


def ask(
    asked: Asked,
    sessions: Sequence[list[SessionRow]],
    *,
    write: bool = True,
    between: Sequence[np.ndarray] = (),
    others: bool = False,
    twice: bool = False,
) -> dict[str, float | int]:
    """The share of exact answers when all rows but the last have been told.

    Args:
      asked: the model.
      sessions: of which the last row asks.
      write: whether anything is told.
      between: rows that are read after those of the session.
      others: whether the told rows of five other sessions are read after them.
      twice: whether they are told twice.
    """
    right = []
    for first in range(0, len(sessions), _BATCH):
        some = sessions[first : first + _BATCH]
        memory = asked.start(len(some))
        told = [[row.tokens for row in rows[:-1]] for rows in some]
        if twice:
            told = [rows * 2 for rows in told]
        if others:
            for number, rows in enumerate(told):
                for step in range(1, 6):
                    other = sessions[(first + number + step) % len(sessions)]
                    rows += [row.tokens for row in other[:-1]]
        told = [[*rows, *between] for rows in told]
        for number in range(max(map(len, told)) if write else 0):
            # A session without a further row reads one token of padding.
            rows = [rows[number] if number < len(rows) else rows[0][:0] for rows in told]
            memory = asked.read(memory, rows)
        right += asked.right(memory, [rows[-1] for rows in some])
    return share(right)


def in_context(sessions: Sequence[list[SessionRow]]) -> list[list[SessionRow]]:
    """The sessions with all rows joined into the one that asks."""
    joined = []
    for rows in sessions:
        before = np.concatenate([row.tokens for row in rows[:-1]])
        last = rows[-1]
        answers = [x._replace(start=x.start + len(before)) for x in last.answers]
        joined.append([SessionRow(np.concatenate([before, last.tokens]), answers)])
    return joined


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv)
    run = load_run(options.run)
    tokenizer = load_tokenizer(run.experiment.data.text.tokenizer)
    sessions = list(read_sessions(data_files(str(options.sessions)), tokenizer))
    few = sessions[: options.few]
    asked = Asked(run)

    def say(condition: str, found: dict) -> None:
        line = {"sessions_file": options.sessions.name, "condition": condition, **found}
        print(json.dumps(line), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    say("written", ask(asked, sessions))
    say("not written", ask(asked, sessions, write=False))
    say("told twice", ask(asked, few, twice=True))
    say("after five other sessions", ask(asked, few, others=True))
    say("without the write that keeps", ask(Asked(run, retention=False), sessions))
    if options.book is not None:
        book = tokenizer.encode(options.book.read_text())[:2000]
        if len(book) < 2000:
            raise ValueError(f"{options.book} has {len(book)} tokens; name a text of 2,000.")
        pieces = np.split(book, range(500, 2000, 500))
        say("after 2,000 tokens of a book", ask(asked, few, between=pieces))
    if options.base is not None:
        base = Asked(load_run(options.base))
        say("the base, all in its context", ask(base, in_context(sessions), write=False))


if __name__ == "__main__":
    main()
