"""Asks facts told in book text again after more and more saved and reloaded conversations.

    python -m lab.study.retrofit
    python -m lab.study.lasting_text --out lab/results/lasting_text_cpu.json

The runs are those of `lab.study.retrofit`, or any run on text with needles. Each person
tells a model five facts: needles in a haystack of book text, as the needle evaluation builds them,
read several times. Conversations about other books follow. At the end of each reading and each
conversation everything is written, the memories are saved without caches (`fwpkm_jax.memories`, a
fork of the untouched memory) and loaded again. The facts are asked for without being read again,
and before they are told as a control.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.machine import environment, settings, write_result
from benchmarks.options import parse
from fwpkm_jax import memories
from fwpkm_jax.data import TextData, Tokenizer, needle_question
from fwpkm_jax.evaluation import NeedleConfig
from fwpkm_jax.evaluation.needle.files import texts_of
from fwpkm_jax.evaluation.needle.samples import NeedleSample, take_samples
from fwpkm_jax.evaluation.needle.scores import score_answers
from fwpkm_jax.evaluation.sources import text_sources
from fwpkm_jax.generation import generate, init_generation
from fwpkm_jax.run import Run, load_run, text_tokenizer

BEFORE = -1
"""The number of conversations of the control."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tells facts in book text, then talks about other books."""

    runs: tuple[Path, ...] = tuple(
        Path(f"runs/study/retrofit/fwpkm_seed{seed}") for seed in range(3)
    )
    """Run directories; the text is their validation text."""
    people: int = 20
    """Conversations side by side, each with a memory and a haystack of its own."""
    words: int = 56
    """Words of a haystack, with five needles."""
    readings: int = 4
    """How often a haystack is read."""
    asked: tuple[int, ...] = (0, 1, 2, 5, 10, 20, 30)
    """Numbers of later conversations after which the facts are asked for, increasing."""
    length: int = 500
    """Tokens of a later conversation."""
    seed: int = 0
    """Seed of the facts."""
    out: Path | None = None
    """File of the results."""


class Texts(NamedTuple):
    """What is read and asked, as token ids; the same for every run of one text."""

    samples: list[NeedleSample]
    """The haystack of each person."""
    told: list[np.ndarray]
    later: np.ndarray
    """`[conversations, people, length]`, from documents that no haystack is from."""


def texts_for(data: TextData, tokenizer: Tokenizer, options: Options) -> Texts:
    """The texts from a run's validation text.

    Raises:
      ValueError: there is too little text.
    """
    texts = list(texts_of(text_sources(data), tokenizer))
    config = NeedleConfig(haystack_words=(options.words,), samples=options.people)
    samples = take_samples(texts, config, words=options.words, seed=options.seed)
    used = {sample.document for sample in samples}
    others = [tokenizer.encode(text) for document, text in texts if document not in used]
    tokens = np.concatenate(others) if others else np.zeros(0, np.int32)
    shape = (max(options.asked), len(samples), options.length)
    if len(samples) < options.people or len(tokens) < np.prod(shape):
        raise ValueError(
            f"The text has {len(samples)} haystacks and {len(tokens)} tokens of other documents, "
            f"not {options.people} and {np.prod(shape)}; lower people, length or asked."
        )
    told = [tokenizer.encode(sample.haystack) for sample in samples]
    return Texts(samples, told, tokens[: np.prod(shape)].reshape(shape))


def curve(run: Run, name: str, options: Options, folder: Path) -> list[dict[str, Any]]:
    """The answers before the facts are told and after each number of conversations."""
    model, tokenizer = run.model, text_tokenizer(run)
    data = run.experiment.data.text
    assert data is not None, "text_tokenizer has refused runs on other data"
    texts = texts_for(data, tokenizer, options)
    longest = max(options.length, *map(len, texts.told))
    memory = jax.tree.map(lambda x: jnp.repeat(x[:1], options.people, axis=0), run.memory)
    sizes = {"max_length": longest, "max_chunk_size": longest}
    untouched = init_generation(model, memory, batch=options.people, **sizes)
    memories.save(folder, "untouched", untouched, model=model, keep="memory")
    memories.fork(folder, "untouched", "people")
    load = partial(memories.load, folder, "people", model, max_length=longest)

    def talk(text: Sequence[np.ndarray]) -> None:
        """Reads a text with one write at its end, as the needle evaluation does, and saves."""
        state = generate(model, list(text), load(), max_new_tokens=0, chunk_size="flush").state
        state = state._replace(stream=_flush(*nnx.split(model), state.stream))
        memories.save(folder, "people", state, model=model, keep="memory")

    def row(conversations: int) -> dict[str, Any]:
        size = memories.describe(folder, "people").num_bytes
        return {
            "run": name,
            "conversations": conversations,
            **ask(model, load(), texts.samples, tokenizer),
            "kilobytes_per_person": round(size / 1000 / options.people, 1),
        }

    rows = [row(BEFORE)]
    for _ in range(options.readings):
        talk(texts.told)
    for conversations in range(max(options.asked) + 1):
        if conversations:
            talk(texts.later[conversations - 1])
        if conversations in options.asked:
            rows.append(row(conversations))
    return rows


@partial(jax.jit, static_argnames="graphdef", donate_argnames="stream")
def _flush(graphdef: Any, params: Any, stream: Any) -> Any:
    return nnx.merge(graphdef, params).flush(stream)


def ask(
    model: Any, state: Any, samples: Sequence[NeedleSample], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Asks each person for each fact, from the same state and without writing.

    Returns:
      The share of `exact` answers with Wilson's `interval`, the mean number of right `digits`, and
      how many answers of each person are `right`.
    """
    asked, answers = [], []
    for target in range(len(samples[0].needles)):
        needles = [sample.needles[target] for sample in samples]
        asked += [
            sample._replace(target=target, answer=needle.value)
            for sample, needle in zip(samples, needles, strict=True)
        ]
        questions = [tokenizer.encode(f" {needle_question(needle.key)}") for needle in needles]
        options = {"max_new_tokens": len(needles[0].value), "write": False, "keep_state": True}
        tokens = generate(model, questions, state, **options).tokens
        answers += [tokenizer.decode(one) for one in np.asarray(tokens)]
    scores = score_answers(asked, answers)
    exact = np.asarray([record["exact"] for record in scores["samples"]])
    return {
        "questions": scores["exact"]["answers"],
        "exact": round(scores["exact"]["accuracy"], 4),
        "interval": [round(bound, 4) for bound in scores["exact"]["interval"]],
        "digits": round(scores["digits"], 3),
        "right": exact.reshape(-1, len(samples)).sum(axis=0).tolist(),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Exact answers with intervals, and digits, by the number of conversations since."""
    numbers = list(dict.fromkeys(row["conversations"] for row in rows))
    names = ["before" if number == BEFORE else str(number) for number in numbers]
    lines = [f"| conversations since | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for run in dict.fromkeys(row["run"] for row in rows):
        found = [row for row in rows if row["run"] == run]
        exact = [
            f"{row['exact']:.2f} [{row['interval'][0]:.2f}, {row['interval'][1]:.2f}]"
            for row in found
        ]
        lines.append(f"| {run}, exact | {' | '.join(exact)} |")
        digits = [f"{row['digits']:.1f}" for row in found]
        lines.append(f"| {run}, digits | {' | '.join(digits)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    options = parse(Options, argv, description=__doc__)
    rows = []
    stated = {name: value for name, value in settings(options).items() if name != "runs"}
    for directory in options.runs:
        with tempfile.TemporaryDirectory() as folder:
            rows += curve(load_run(directory), directory.name, options, Path(folder))
        result = {"settings": stated, "machine": environment(), "rows": rows}
        write_result(result, options.out)  # After each run, so that a stop loses one at most.
    print(table(rows))


if __name__ == "__main__":
    main()
