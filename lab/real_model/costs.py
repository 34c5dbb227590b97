"""What a run's memory costs: loss of books, slots that a session writes, time per token.

    python -m lab.real_model.costs --run RUN --base BASE --sessions FILE --books FILE --out LINES

Each book is one sequence of tokens, of which the last 256 count; the loss is compared with that of
the model alone, nothing written, the 512 tokens before written, or a session written.
"""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.options import parse
from fwpkm_jax.data.tokenizers import load_tokenizer
from fwpkm_jax.generation import generate, init_generation
from fwpkm_jax.run.load import Run, load_run
from fwpkm_jax.storage.compile_cache import use_compile_cache
from lab.real_model.evaluate import Asked, sessions_of

_COUNTED, _BEFORE, _SKIPPED = 256, 512, 2000
_BATCH = 4


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measures what a run's memory costs."""

    run: Path
    """Directory of the run."""
    base: Path
    """Run of the model alone."""
    sessions: Path
    """Sessions, JSON lines."""
    books: Path
    """Texts, JSON lines; their first 2,000 tokens are left out."""
    texts: int = 24
    """Books that are read."""
    tokens: int = 128
    """Tokens of each of five timed answers."""
    out: Path | None = None
    """JSON lines, to which the results are added."""


def text_losses(
    asked: Asked, base: Asked, sessions: Sequence[Any], books: Sequence[np.ndarray]
) -> Iterator[dict[str, Any]]:
    """Of each condition the books' losses beside those of the model alone."""
    before, counted = zip(*(np.split(book, [_BEFORE]) for book in books), strict=True)
    told = [sessions[number % len(sessions)][0].tokens for number in range(len(books))]
    alone = _losses(base, None, counted)
    conditions = {
        "nothing written": None,
        "the 512 tokens before written": before,
        "a session of eight facts written": told,
    }
    for condition, rows in conditions.items():
        more = _losses(asked, rows, counted) - alone
        yield {
            "what": "loss of text",
            "condition": condition,
            "base": round(float(alone.mean()), 4),
            "more": round(float(more.mean()), 4),
            "interval": round(1.96 * float(more.std(ddof=1)) / len(more) ** 0.5, 4),
            "books": len(more),
        }


def _losses(
    asked: Asked, told: Sequence[np.ndarray] | None, rows: Sequence[np.ndarray]
) -> np.ndarray:
    found = []
    for first in range(0, len(rows), _BATCH):
        some = rows[first : first + _BATCH]
        memory = asked.start(len(some))
        if told is not None:
            memory = asked.read(memory, told[first : first + _BATCH])
        found += asked.losses(memory, some)
    return np.array(found)


def slots(asked: Asked, sessions: Sequence[Any]) -> dict[str, Any]:
    """How many slots the told rows of a session write."""
    counts, tokens, values = [], [], []
    for rows in sessions:
        memory = asked.start(1)
        for row in rows[:-1]:
            memory = asked.read(memory, [row.tokens])
        values = [np.asarray(one.values) for one in memory.values()]
        counts.append(sum(int(np.any(one != 0, axis=-1).sum()) for one in values))
        tokens.append(sum(len(row.tokens) for row in rows[:-1]))
    return {
        "what": "slots",
        "mean": statistics.mean(counts),
        "least": min(counts),
        "most": max(counts),
        "of": sum(one.shape[1] for one in values),
        "tokens": statistics.mean(tokens),
        "sessions": len(counts),
    }


def times(runs: dict[str, Run], prompt: np.ndarray, tokens: int) -> Iterator[dict[str, Any]]:
    """Milliseconds per generated token of each run, which take turns."""
    states, taken = {}, {name: [] for name in runs}
    for name, run in runs.items():
        memory = jax.tree.map(lambda x: x[:1], run.memory)
        state = init_generation(run.model, memory, batch=1, max_length=len(prompt) + 6 * tokens)
        states[name] = generate(run.model, [prompt], state, max_new_tokens=tokens).state
    for _ in range(5):
        for name, run in runs.items():
            began, worked = time.perf_counter(), time.process_time()
            output = generate(run.model, None, states[name], max_new_tokens=tokens)
            states[name] = jax.block_until_ready(output.state)
            seconds = time.perf_counter() - began, time.process_time() - worked
            taken[name].append([1e3 * one / tokens for one in seconds])
    for name, rounds in taken.items():
        clock, processor = (statistics.median(one) for one in zip(*rounds, strict=True))
        yield {
            "what": "time per token",
            "model": name,
            "clock_ms": round(clock, 2),
            "processor_ms": round(processor, 2),
            "least_clock_ms": round(min(one for one, _ in rounds), 2),
            "rounds": len(rounds),
        }


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv)
    use_compile_cache()
    runs = {"base": load_run(options.base), "memory": load_run(options.run)}
    tokenizer = load_tokenizer(runs["memory"].experiment.data.text.tokenizer)
    sessions = sessions_of(options.sessions, tokenizer)
    end = _SKIPPED + _BEFORE + _COUNTED
    books = []
    for line in options.books.read_text().splitlines()[: options.texts]:
        text = json.loads(line)["text"][: 12 * end]
        book = tokenizer.encode(text)[_SKIPPED:end]
        if len(book) < _BEFORE + _COUNTED:
            raise ValueError(
                f"A book of {options.books} has fewer than {end} tokens; leave it out."
            )
        books.append(book)

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    for line in times(runs, books[0][:64], options.tokens):
        say(line)
    base, asked = (Asked(run) for run in runs.values())
    say(slots(asked, sessions))
    for line in text_losses(asked, base, sessions, books):
        say(line)


if __name__ == "__main__":
    main()
