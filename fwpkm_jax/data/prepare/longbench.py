"""LongBench's tasks as tokens: for each sample context block, question block and answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fwpkm_jax.data.longbench import MAX_TOKENS, open_task, read_samples
from fwpkm_jax.data.prepare.records import Record, Source, select
from fwpkm_jax.data.tokenizers import Tokenizer

WANTED = "data.zip of huggingface.co/datasets/THUDM/LongBench"


@dataclass(frozen=True)
class LongBenchTask:
    """The samples of one task that are used."""

    path: Path
    name: str
    tokenizer: Tokenizer

    @property
    def files(self) -> dict[str, Path]:
        if self.path.is_dir():
            with open_task(self.path, self.name) as lines:
                file = Path(lines.name)
            return {file.name: file}
        return {self.path.name: self.path}

    def count(self) -> int:
        return max((number for number, _ in read_samples(self.path, self.name)), default=0)

    def read(self, start: int) -> Iterator[Record]:
        for number, sample in read_samples(self.path, self.name, skip=start):
            if sample is None or sample.num_tokens(self.tokenizer) > MAX_TOKENS:
                yield Record(number, ())
            else:
                yield Record(number, (sample.context, sample.question, sample.answers[0]))


def longbench_task(path: str | Path, task: str, *, tokenizer: Tokenizer) -> Source:
    """Three documents per sample, without an end: context block, question block, first answer.

    Args:
      path: LongBench's `data.zip`, or a folder of its `TASK.jsonl` files.
      task: one of `longbench.TASKS`.
      tokenizer: decides which samples are too long.

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
        spans=select([LongBenchTask(path, task, tokenizer)]),
        settings={"task": task, "entries_per_sample": ["context", "question", "answer"]},
        append_eos=False,
    )
