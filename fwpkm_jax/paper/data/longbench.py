"""LongBench's tasks as tokens: for each sample context block, question block and answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fwpkm_jax.data.json_lines import Place
from fwpkm_jax.data.longbench import MAX_TOKENS, TASKS, open_task, read_samples
from fwpkm_jax.data.prepare.command import AbstractSource
from fwpkm_jax.data.prepare.sources import Source, select
from fwpkm_jax.data.streams.files import LocalFile
from fwpkm_jax.data.streams.formats import Piece
from fwpkm_jax.data.tokenizers import Tokenizer

WANTED = "data.zip of huggingface.co/datasets/THUDM/LongBench"


@dataclass(frozen=True, kw_only=True)
class LongBench(AbstractSource):
    """LongBench's question-answering tasks: data.zip, to a folder of one file per task."""

    tasks: tuple[str, ...] = TASKS
    """Tasks to write; the paper's five by default."""
    layout: Literal["stream"] = "stream"
    """Three entries per sample: context block, question block, answer; no end of document."""

    def jobs(self) -> Iterator[tuple[Path, Source, int | None]]:
        for task in self.tasks:
            source = longbench_task(self.input, task)
            yield self.folder / f"{task}.bin", source, None


@dataclass(frozen=True)
class LongBenchTask:
    """The samples of one task that are used."""

    path: Path
    name: str

    @property
    def files(self) -> dict[str, LocalFile]:
        file = self.path
        if file.is_dir():
            with open_task(file, self.name) as lines:
                file = Path(lines.name)
        return {file.name: LocalFile(str(file), file)}

    def count(self) -> int:
        return max((number for number, _ in read_samples(self.path, self.name)), default=0)

    def read(self, tokenizer: Tokenizer, start: Place) -> Iterator[Piece]:
        for number, sample in read_samples(self.path, self.name, skip=start.record):
            if sample is None or sample.num_tokens(tokenizer) > MAX_TOKENS:
                continue
            texts = (sample.context, sample.question, sample.answers[0])
            for part, text in enumerate(texts):
                if (place := Place(number - 1, part)) >= start:
                    yield Piece(place, text, f"{sample.id}:{part}")


def longbench_task(path: str | Path, task: str) -> Source:
    """Three documents per sample, without an end: context block, question block, first answer.

    Args:
      path: LongBench's `data.zip`, or a folder of its `TASK.jsonl` files.
      task: one of `longbench.TASKS`.

    Raises:
      FileNotFoundError: there is no such path, or it does not hold the task.
      ValueError: the task is unknown.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"There is no {path.absolute()}; download {WANTED}.")
    with open_task(path, task):
        pass
    return Source(
        name="longbench",
        spans=select([LongBenchTask(path, task)]),
        settings={"task": task, "entries_per_sample": ["context", "question", "answer"]},
        append_eos=False,
    )
