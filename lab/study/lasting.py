"""Asks the same facts again after more and more saved and reloaded conversations about other text.

    fwpkm train recall
    python -m lab.study.lasting

Each person tells a model some facts, which it writes into a memory of this person's own. After
every conversation the memories are saved without caches (`fwpkm_jax.memories`, a fork of the
untouched memory) and loaded again, and the facts of the first conversation are asked for. The later
conversations are filler, or state as many facts about other keys. As controls, the facts are asked
for before they are told, and conversations state other values of the same keys.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.machine import environment, settings, write_result
from benchmarks.options import parse
from fwpkm_jax import memories
from fwpkm_jax.data import RecallData
from fwpkm_jax.generation import GenerationState, generate, init_generation
from fwpkm_jax.run import load_run

KINDS = ("filler", "other facts", "the same keys")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tells facts, then talks about other things."""

    run: Path = Path("runs/recall")
    """Run directory of a model that was trained on recall."""
    people: int = 64
    """Conversations side by side, each with a memory of its own."""
    facts: int | None = None
    """Facts of each person, in a text of four times as many tokens. None: as in a document of the
    run's task."""
    conversations: int = 30
    """Saved and reloaded conversations after the first."""
    seed: int = 0
    """Seed of facts and filler."""
    out: Path | None = None
    """File of the results."""


class Facts:
    """Texts in the tokens of the task that the model was trained on."""

    def __init__(self, data: RecallData, people: int, seed: int):
        self._data, self._people = data, people
        self._rng = np.random.default_rng(seed)
        shuffled = self._rng.permuted(np.tile(np.arange(data.num_keys), (people, 1)), axis=1)
        self._keys = shuffled[:, : data.num_facts]
        self._others = shuffled[:, data.num_facts :]
        self._values = self._rng.integers(data.num_values, size=self._keys.shape)
        self._length = data.length - 2 * data.num_facts

    def told(self) -> np.ndarray:
        """A text that states the facts of each person, `[people, length]`."""
        return self._text(self._keys, self._values)

    def other(self, kind: str) -> np.ndarray:
        """A text of the same length without these facts."""
        if kind == "filler":
            return self._text(self._keys[:, :0], self._values[:, :0])
        values = self._rng.integers(self._data.num_values, size=self._keys.shape)
        if kind == "the same keys":
            return self._text(self._keys, values)
        others = self._rng.permuted(self._others, axis=1)
        return self._text(others[:, : self._data.num_facts], values)

    def questions(self) -> tuple[np.ndarray, np.ndarray]:
        """Each key and its value in turn, and where the value is to be said: after its key."""
        tokens = self._filler(2 * self._data.num_facts)
        tokens[:, 0::2] = self._data.first_key + self._keys
        tokens[:, 1::2] = self._data.first_value + self._values
        return tokens, np.arange(0, tokens.shape[1], 2)

    def _text(self, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Pairs in the first half, so that the chunk that holds the last one is written."""
        tokens = self._filler(self._length)
        places = self._length // 4
        for row in range(self._people):
            at = 2 * np.sort(self._rng.permutation(places)[: keys.shape[1]])
            tokens[row, at] = self._data.first_key + keys[row]
            tokens[row, at + 1] = self._data.first_value + values[row]
        return tokens

    def _filler(self, length: int) -> np.ndarray:
        shape = (self._people, length)
        return self._rng.integers(self._data.num_filler, size=shape, dtype=np.int32)


@partial(jax.jit, static_argnames="graphdef")
def _logits(graphdef: Any, params: Any, state: GenerationState, tokens: jax.Array) -> jax.Array:
    return nnx.merge(graphdef, params).stream(tokens, state.stream, write=False).logits


def task(data: RecallData, facts: int | None) -> RecallData:
    """The task that a model was trained on, with this number of facts in a document.

    Raises:
      ValueError: there are too few keys for as many facts about other keys.
    """
    if facts is None:
        return data
    if 2 * facts > data.num_keys:
        raise ValueError(
            f"facts={facts} needs {2 * facts} keys, half of them for other facts, and the run has "
            f"{data.num_keys}; lower --facts, or train with more --data.num_keys."
        )
    return replace(data, num_facts=facts, num_questions=None, min_distance=2, length=6 * facts)


def curve(run: Any, kind: str, options: Options, folder: Path) -> list[dict[str, Any]]:
    """The share of facts that are answered, after each conversation; and what saving took.

    The first row is of the memories before the facts are told.
    """
    model, data = run.model, task(run.experiment.data, options.facts)
    texts = Facts(data, options.people, options.seed)
    questions, asked = texts.questions()
    memory = jax.tree.map(lambda x: jnp.repeat(x[:1], options.people, axis=0), run.memory)
    start = partial(init_generation, model, batch=options.people, max_length=data.length)
    memories.save(folder, "untouched", start(memory), model=model, keep="memory")
    memories.fork(folder, "untouched", "people")
    rows = []
    for number in range(-1, options.conversations + 1):
        state = memories.load(folder, "people", model, max_length=data.length)
        if number >= 0:
            text = texts.other(kind) if number else texts.told()
            state = generate(model, text, state, max_new_tokens=0).state
        began = time.perf_counter()
        memories.save(folder, "people", state, model=model, keep="memory")
        state = memories.load(folder, "people", model, max_length=data.length)
        seconds = time.perf_counter() - began
        logits = _logits(*nnx.split(model), state, jnp.asarray(questions))
        said = np.argmax(np.asarray(logits)[:, asked], axis=-1)
        rows.append(
            {
                "text": kind,
                "conversations": number,
                "recall": round(float(np.mean(said == questions[:, asked + 1])), 4),
                "kilobytes_per_person": round(
                    memories.describe(folder, "people").num_bytes / 1000 / options.people, 1
                ),
                "seconds_to_save_and_load": round(seconds, 3),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Recall by the number of conversations since."""
    numbers = sorted({row["conversations"] for row in rows})
    shown = [n for n in numbers if n in (-1, 0, 1, 2, 5, 10, 20) or n == numbers[-1]]
    names = ["before" if number < 0 else str(number) for number in shown]
    lines = [
        f"| conversations since | {' | '.join(names)} |",
        "|---" * (len(shown) + 1) + "|",
    ]
    for kind in KINDS:
        cells = [
            f"{r['recall']:.2f}" for r in rows if r["text"] == kind and r["conversations"] in shown
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    options = parse(Options, argv, description=__doc__)
    run = load_run(options.run)
    rows = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            rows += curve(run, kind, options, Path(folder))
    print(table(rows))
    result = {"settings": settings(options), "machine": environment(), "rows": rows}
    write_result(result, options.out)


if __name__ == "__main__":
    main()
