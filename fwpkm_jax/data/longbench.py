"""LongBench's five question-answering tasks: which samples are used, and their prompts.

Context, question and answer are tokenised separately and then joined; no tokens are added at either
end.

References: Bai et al. 2023, arXiv:2308.14508; as used by Zhao and Jones 2026, arXiv:2601.00671.
"""

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, NamedTuple

from fwpkm_jax.data.json_lines import read_json_lines, text_field
from fwpkm_jax.data.tokenizers import Tokenizer
from fwpkm_jax.io.untrusted import OutsideFileError, open_file, reading

MAX_WORDS = 65_536
"""Samples longer than this, in words as the data set counts them, are left out."""
MAX_TOKENS = 131_072
"""Samples longer than this, in tokens of both blocks and the longest answer, are left out."""

_MOST_BYTES = 2**30

_ONLY_ANSWER = "Only give me the answer and do not output any other words."
_PASSAGES = f"Answer the question based on the given passages. {_ONLY_ANSWER}\n"
_CONTEXT = f"Answer the question based on the given context. {_ONLY_ANSWER}\n"
_PHRASE = "as concisely as you can, using a single phrase if possible."
_QUESTION = "Question:\n{}\nAnswer:\n"

# Context block and question block of each task; two spaces before "explanation", as published.
PROMPTS: dict[str, tuple[str, str]] = {
    "narrativeqa": (
        "You are given a story, which can be either a novel or a movie script, and a question.\n"
        f"Answer the question {_PHRASE} Do not provide any  explanation.\nStory:\n{{}}\n",
        f"Now, answer the question based on the story {_PHRASE} Do not provide any explanation.\n"
        + _QUESTION,
    ),
    "multifieldqa_en": (
        "Read the following text and answer briefly.\n{}\n",
        "Now, answer the following question based on the above text, only give me the answer and "
        "do not output any other words.\n" + _QUESTION,
    ),
    "hotpotqa": (
        _PASSAGES + "The following are given passages.\n{}\n",
        _PASSAGES + _QUESTION,
    ),
    "2wikimqa": (
        _PASSAGES + "The following are given passages.\n{}\n",
        _PASSAGES + _QUESTION,
    ),
    "musique": (_CONTEXT + "Context:\n{}\n", _CONTEXT + _QUESTION),
}
TASKS = tuple(PROMPTS)


class LongBenchSample(NamedTuple):
    """A question about a text."""

    id: str
    """The record's `_id`, else its task and line."""
    context: str
    """The block that holds the text."""
    question: str
    """The block that asks."""
    answers: tuple[str, ...]
    """Reference answers; the first is the one that is scored."""

    def num_tokens(self, tokenizer: Tokenizer) -> int:
        """Tokens of both blocks and the longest answer."""
        prompt = len(tokenizer.encode(self.context)) + len(tokenizer.encode(self.question))
        return prompt + max(len(tokenizer.encode(answer)) for answer in self.answers)


def read_samples(path: str | Path, task: str) -> Iterator[tuple[int, LongBenchSample | None]]:
    """Line numbers, from 1, and samples of one task; None for a sample that is left out.

    Left out are samples that are not English or longer than `MAX_WORDS`; `MAX_TOKENS` needs a
    tokenizer and is the caller's.

    Args:
      path: the published `data.zip`, a folder of `TASK.jsonl` files, or such a file.
      task: one of `TASKS`.

    Raises:
      ValueError: the task is unknown or a record lacks a field; the error names it.
      FileNotFoundError: there is no such path, or it does not hold the task.
    """
    if task not in PROMPTS:
        raise ValueError(f"task={task!r} is not one of {', '.join(TASKS)}.")
    path = Path(path).expanduser()
    with open_task(path, task) as lines:
        for place, record in read_json_lines(lines, name=f"{path} ({task})"):
            number = place.record + 1
            yield number, _sample(record, task, number, place=f"{path} ({task}), line {number}")


def task_files(path: Path, tasks: Sequence[str]) -> list[Path]:
    """The files that hold tasks: an archive, one task's file, or those of a folder.

    Raises:
      FileNotFoundError: the folder does not hold a task. ValueError: one task's file is given for
      several tasks.
    """
    if path.suffix == ".jsonl" and len(tasks) > 1:
        raise ValueError(
            f"{path} is one task's file, but tasks={tasks}; give its folder or one task."
        )
    return [_in_folder(path, task) for task in tasks] if path.is_dir() else [path]


def _names(task: str) -> tuple[str, str]:
    """A task's file below a folder or in the archive."""
    return f"data/{task}.jsonl", f"{task}.jsonl"


def _in_folder(folder: Path, task: str) -> Path:
    for name in _names(task):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"The folder {folder.absolute()} holds no {task}.jsonl.")


def open_task(path: Path, task: str) -> AbstractContextManager[IO[bytes]]:
    """The lines of a task, from an archive without unpacking it, a folder or a file.

    Raises:
      FileNotFoundError: there is no such path, or it does not hold the task. ValueError: the file
      is neither JSON lines nor a zip archive, or would unpack to an implausible size.
    """
    names = _names(task)
    if path.is_dir():
        return open_file(_in_folder(path, task))
    if not path.is_file():
        raise FileNotFoundError(f"There is no {path.absolute()}; name LongBench's data.zip.")
    if path.suffix == ".jsonl":
        return open_file(path)
    with reading(path):
        is_archive = zipfile.is_zipfile(path)
    if not is_archive:
        raise ValueError(f"{path} is neither a .jsonl file nor a zip archive; download it again.")
    with reading(path):
        archive = zipfile.ZipFile(path)
    with archive:
        for name in names:
            if name in archive.namelist():
                if (size := archive.getinfo(name).file_size) > _MOST_BYTES:
                    problem = f"unpacks to {size:,} bytes, more than any task"
                    raise OutsideFileError(path, problem, name, "download it again")
                with reading(path, place=name):
                    # The member keeps the archive open, and checks its CRC at the end.
                    return archive.open(name)
    raise FileNotFoundError(f"The archive {path.absolute()} holds no {' or '.join(names)}.")


def _sample(
    record: dict[str, Any], task: str, number: int, *, place: str
) -> LongBenchSample | None:
    context, question = (
        prompt.replace("{}", text_field(record, field, place=place))
        for prompt, field in zip(PROMPTS[task], ("context", "input"), strict=True)
    )
    answers = record.get("answers")
    if not isinstance(answers, list) or not answers:
        raise ValueError(f"{place}: field 'answers' is {answers!r}, not a list of texts.")
    numbered = {str(index): answer for index, answer in enumerate(answers)}
    texts = tuple(text_field(numbered, index, place=f"{place}, answers") for index in numbered)
    words, language = record.get("length"), text_field(record, "language", place=place)
    if not isinstance(words, int):
        raise ValueError(f"{place}: field 'length' is {words!r}, not a number of words.")
    if language != "en" or words > MAX_WORDS:
        return None
    return LongBenchSample(str(record.get("_id") or f"{task}:{number}"), context, question, texts)
