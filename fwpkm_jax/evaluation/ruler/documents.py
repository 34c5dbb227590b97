"""Questions about documents in the published files of SQuAD 2 and HotpotQA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fwpkm_jax.outside_files import OutsideFileError, read_json

_MOST_BYTES = 2**30


class DocumentQuestion(NamedTuple):
    """A question and where its answer stands.

    Attributes:
      query: the question.
      answers: right answers.
      own: numbers of the documents that are always in the text.
      near: numbers of documents of the same article, which are taken before others.
    """

    query: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...]


def read_squad(path: Path) -> tuple[list[DocumentQuestion], list[str]]:
    """Questions with an answer, and all paragraphs, of a file of SQuAD 2.

    Raises:
      OutsideFileError: it is another file.
    """
    with _shape(path, "SQuAD 2"):
        articles = _read(path, dict)["data"]
        texts = sorted({one["context"] for article in articles for one in article["paragraphs"]})
        numbers = {text: number for number, text in enumerate(texts)}
        found = []
        for article in articles:
            near = tuple(dict.fromkeys(numbers[one["context"]] for one in article["paragraphs"]))
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    if question.get("is_impossible", False):
                        continue
                    answers = tuple(str(one["text"]) for one in question["answers"])
                    own = (numbers[paragraph["context"]],)
                    found.append(DocumentQuestion(str(question["question"]), answers, own, near))
        return _some(found, path), texts


def read_hotpotqa(path: Path) -> tuple[list[DocumentQuestion], list[str]]:
    """Questions and all paragraphs of a file of HotpotQA (distractor setting).

    Raises:
      OutsideFileError: it is another file.
    """
    with _shape(path, "HotpotQA"):
        records = _read(path, list)
        named = [[f"{title}\n{''.join(lines)}" for title, lines in x["context"]] for x in records]
        texts = sorted({text for one in named for text in one})
        numbers = {text: number for number, text in enumerate(texts)}
        found = [
            DocumentQuestion(
                str(record["question"]),
                (str(record["answer"]),),
                tuple(dict.fromkeys(numbers[text] for text in own)),
                (),
            )
            for record, own in zip(records, named, strict=True)
        ]
        return _some(found, path), texts


READERS = {"squad": read_squad, "hotpotqa": read_hotpotqa}


def _read(path: Path, kind: type) -> Any:
    return read_json(path, otherwise="name the published file", kind=kind, most=_MOST_BYTES)


def _some(found: list[DocumentQuestion], path: Path) -> list[DocumentQuestion]:
    if not found:
        raise OutsideFileError(path, "holds no question", otherwise="name the published file")
    return found


@contextlib.contextmanager
def _shape(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, OutsideFileError):
            raise
        problem = f"is not a file of {what} ({type(error).__name__}: {error!s:.80})"
        raise OutsideFileError(path, problem, otherwise="name the published file") from error
