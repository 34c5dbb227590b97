"""Accuracy on bAbI's questions in texts of chosen lengths, with the memory writing and frozen."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fwpkm_jax.data import Tokenizer, load_tokenizer
from fwpkm_jax.evaluation.babilong.samples import (
    TASKS,
    Background,
    Story,
    find_task,
    hide,
    read_stories,
)
from fwpkm_jax.evaluation.data_files import local_path
from fwpkm_jax.evaluation.interface import Evaluation, Outcome, Subject
from fwpkm_jax.evaluation.option_checks import check_least, check_names
from fwpkm_jax.evaluation.questions import views
from fwpkm_jax.evaluation.questions.asking import Group, Question, ReadingOptions, ask
from fwpkm_jax.evaluation.questions.texts import read_texts, sentences_of
from fwpkm_jax.evaluation.readers.batch_reader import check_one_device
from fwpkm_jax.evaluation.sources import sha256
from fwpkm_jax.outside_files import OutsideFileError, read_json

_NEW_TOKENS = 20
_PROMPT = {
    "instruction": "Facts are hidden in the text below. Answer the question from them alone.",
    "examples": "",
    "post_prompt": "Answer with one word.",
}
"""Written for this package. The benchmark's own prompts are longer, differ by task and hold solved
examples; the option `prompts` takes them."""


@dataclass(frozen=True, kw_only=True)
class BabilongConfig(ReadingOptions):
    """BABILong."""

    data: str | None = None
    """bAbI's folder of files such as qa1_single-supporting-fact_test.txt, here or on the hub
    (hf://datasets/OWNER/NAME/FOLDER/)."""
    tasks: tuple[str, ...] = ("qa1", "qa2", "qa3", "qa4", "qa5")
    """Tasks, qa1 to qa20."""
    lengths: tuple[int, ...] = (0, 1000, 2000, 4000)
    """Tokens of the text with the facts, by the run's tokenizer; 0: the facts alone."""
    samples: int = 100
    """Questions of each task and length."""
    text: str | None = None
    """A .txt or .jsonl file, here or on the hub, whose sentences stand between the facts. None: the
    books of this package; BABILong takes those of PG-19."""
    prompts: str | None = None
    """A JSON file with `instruction`, `examples` and `post_prompt` for each task, as the benchmark
    publishes them. None: one short instruction for all tasks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names(self, TASKS, "tasks")
        check_least(self, 1, "samples")
        if not self.tasks or not self.lengths or min(self.lengths) < 0:
            raise ValueError(
                f"tasks={self.tasks} and lengths={self.lengths} must name tasks and numbers of at "
                "least 0."
            )


def evaluate(
    subject: Subject, config: BabilongConfig, *, tokenizer: Tokenizer | None = None
) -> Outcome:
    """Share of questions answered right, by task and length.

    An answer is right if its first sentence names the right one of the task's answers and no other;
    answers that the question names are not counted.

    Args:
      subject: the model and its memory, of which the first group is used; its seed draws the places
        of the facts.
      config: tasks and protocol.
      tokenizer: the model's tokenizer; None: the run's.

    Returns:
      See `ask`.

    Raises:
      ValueError: no data are named, the facts alone are longer than a length, or a file is none of
        bAbI's.
      FileNotFoundError: there is no file of a task.
    """
    check_one_device(subject.partition, "babilong")
    if config.data is None:
        raise ValueError("data=None: name bAbI's folder, as in --babilong.data tasks_1-20_v1-2/en.")
    tokenizer = load_tokenizer(subject.text.tokenizer) if tokenizer is None else tokenizer
    folder = local_path(config.data)
    if folder.is_file() and len(config.tasks) > 1:
        raise ValueError(
            f"{folder} is one task's file, but tasks={config.tasks}; give its folder or one task."
        )
    texts, files = read_texts(config.text)
    sentences = [one for text in texts for one in sentences_of(text)]
    prompts = dict.fromkeys(config.tasks, _PROMPT)
    if config.prompts is not None:
        path = local_path(config.prompts)
        prompts, files[config.prompts] = read_prompts(path, config.tasks), sha256(path)
    groups = []
    for task in config.tasks:
        path = find_task(folder, task)
        files[str(path)] = sha256(path)
        stories = read_stories(path)
        right = partial(is_right, labels={story.answer for story in stories})
        for length in config.lengths:
            background = Background(sentences, tokenizer)
            questions = [
                _question(
                    *(story, prompts[task], background, tokenizer),
                    length=length,
                    rng=np.random.default_rng([subject.seed, TASKS.index(task), length, number]),
                    id=f"{task}-{number}",
                )
                for number, story in enumerate(stories[: config.samples])
            ]
            groups.append(Group(task, length, questions, _NEW_TOKENS, right, ended=_has_sentence))
    return ask(subject, config, groups, tokenizer=tokenizer, name="babilong", files=files)


def is_right(question: Question, answer: str, *, labels: Collection[str]) -> float:
    """1 if the first sentence of an answer names the right label and no other, else 0.

    Labels that the question names are not counted.

    References: Kuratov et al. 2024, arXiv:2406.10149, and its program.
    """
    said = answer.lower().split(".")[0].split("<context>")[0].split("<example>")[0]
    asked = question.question.lower().partition("question:")[2].removesuffix("answer:")
    (right,) = question.references
    named = {x.lower() for x in labels if x.lower() in said and x.lower() not in asked}
    return float(named == {right.lower()})


def _has_sentence(answer: str) -> bool:
    return "." in answer


def _question(
    story: Story,
    prompt: Mapping[str, str],
    background: Background,
    tokenizer: Tokenizer,
    *,
    length: int,
    rng: np.random.Generator,
    id: str,
) -> Question:
    facts = len(tokenizer.encode(" ".join(story.facts)))
    if length and facts > length:
        raise ValueError(
            f"length={length} is too short for {id}, whose facts alone have {facts} tokens; raise "
            "lengths, or give 0 for the facts alone."
        )
    text = hide(story.facts, background.take(length - facts) if length else [], rng)
    before = "\n".join((prompt["instruction"], prompt["examples"], prompt["post_prompt"]))
    return Question(
        f"{before}\n<context>\n{text}".lstrip(),
        f"\n</context>\nQuestion: {story.question}\nAnswer:",
        (story.answer,),
        id,
    )


def read_prompts(path: Path, tasks: Collection[str]) -> dict[str, Mapping[str, str]]:
    """What stands in front of the text, by task.

    Raises:
      OutsideFileError: the file is no JSON object, or lacks a part of a task.
    """
    found: Any = read_json(path, otherwise="see babilong.prompts in the help", kind=dict)
    for task in tasks:
        for part in _PROMPT:
            one = found.get(task)
            if not isinstance(one, dict) or not isinstance(one.get(part), str):
                raise OutsideFileError(
                    path, f"has no text {part!r}", task, "see babilong.prompts in the help"
                )
    return found


def _missing(subject: Subject, config: BabilongConfig) -> str | None:
    if subject.partition is not None:
        return "a single device"
    return None if config.data else "bAbI (--babilong.data FOLDER)"


BABILONG = Evaluation(
    name="babilong",
    config=BabilongConfig,
    evaluate=evaluate,
    limit="samples",
    title="BABILong",
    about=(
        "A few facts, such as who went where, stand far apart in a long text; the model reads the "
        "text and answers a question that needs one or several of them. The same texts are read "
        "with the memory writing and with it frozen."
    ),
    table=views.table,
    plot=views.plot_of("babilong", "BABILong by task and length"),
    finding=views.finding,
    missing=_missing,
)
