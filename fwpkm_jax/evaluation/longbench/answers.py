"""LongBench with its own prompts and scores: greedy answers to the English and the code tasks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fwpkm_jax.data import Tokenizer, load_tokenizer
from fwpkm_jax.data.documents import read_json_lines, text_field
from fwpkm_jax.data.longbench import open_task, task_files
from fwpkm_jax.evaluation.data_files import local_path
from fwpkm_jax.evaluation.interface import Evaluation, Outcome, Subject
from fwpkm_jax.evaluation.longbench.scores import (
    code_similarity,
    named_class,
    rouge_l,
    same_number,
    word_f1,
)
from fwpkm_jax.evaluation.option_checks import check_least, check_names
from fwpkm_jax.evaluation.questions import views
from fwpkm_jax.evaluation.questions.asking import Group, Question, ReadingOptions, ask
from fwpkm_jax.evaluation.readers.batch_reader import check_one_device
from fwpkm_jax.evaluation.sources import sha256

_GIVEN = "Only give me the answer and do not output any other words."
_PASSAGES = f"Answer the question based on the given passages. {_GIVEN}"
_STORY = (
    "asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
)
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question "
    'cannot be answered based on the information in the article, write "unanswerable". If the '
    'question is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide any '
    "explanation.\n\n"
)


class Task(NamedTuple):
    """A task as published (MIT licence): what stands around context and question, and its score.

    Attributes:
      before: up to the context.
      after: behind the context; `{}` is the question.
      new_tokens: tokens of an answer at most.
      score: of an answer and a reference.
      first_line: whether only an answer's first line counts.
    """

    before: str
    after: str
    new_tokens: int
    score: Callable[..., float]
    first_line: bool = False


_HOPS = Task(
    f"{_PASSAGES}\n\nThe following are given passages.\n",
    f"\n\n{_PASSAGES}\n\nQuestion: {{}}\nAnswer:",
    32,
    word_f1,
)
_CODE = Task(
    "Please complete the code given below. \n", "{}Next line of code:\n", 64, code_similarity
)
ANSWER_TASKS: dict[str, Task] = {
    "narrativeqa": Task(
        "You are given a story, which can be either a novel or a movie script, and a question. "
        f"Answer the question {_STORY}Story: ",
        f"\n\nNow, answer the question based on the story {_STORY}Question: {{}}\n\nAnswer:",
        128,
        word_f1,
    ),
    "qasper": Task(
        "You are given a scientific article and a question. Answer the question "
        f"{_ARTICLE}Article: ",
        f"\n\n Answer the question based on the above article {_ARTICLE}Question: {{}}\n\nAnswer:",
        128,
        word_f1,
    ),
    "multifieldqa_en": Task(
        "Read the following text and answer briefly.\n\n",
        "\n\nNow, answer the following question based on the above text, only give me the answer "
        "and do not output any other words.\n\nQuestion: {}\nAnswer:",
        64,
        word_f1,
    ),
    "hotpotqa": _HOPS,
    "2wikimqa": _HOPS,
    "musique": _HOPS,
    "gov_report": Task(
        "You are given a report by a government agency. Write a one-page summary of the "
        "report.\n\nReport:\n",
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        rouge_l,
    ),
    "qmsum": Task(
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n",
        "\n\nNow, answer the query based on the above meeting transcript in one or more "
        "sentences.\n\nQuery: {}\nAnswer:",
        512,
        rouge_l,
    ),
    "multi_news": Task(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n",
        "\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        rouge_l,
    ),
    "trec": Task(
        "Please determine the type of the question below. Here are some examples of questions.\n\n",
        "\n{}",
        64,
        named_class,
        first_line=True,
    ),
    "triviaqa": Task(
        f"Answer the question based on the given passage. {_GIVEN} The following are some "
        "examples.\n\n",
        "\n\n{}",
        32,
        word_f1,
        first_line=True,
    ),
    "samsum": Task(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n",
        "\n\n{}",
        128,
        rouge_l,
        first_line=True,
    ),
    "passage_count": Task(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
        "Please carefully read these paragraphs and determine how many unique paragraphs there are "
        "after removing duplicates. In other words, how many non-repeating paragraphs are there in "
        "total?\n\n",
        "\n\nPlease enter the final count of unique paragraphs after removing duplicates. The "
        "output format should only contain the number, such as 1, 2, 3, and so on.\n\nThe final "
        "answer is: ",
        32,
        same_number,
    ),
    "passage_retrieval_en": Task(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
        "paragraph the abstract is from.\n\n",
        "\n\nThe following is an abstract.\n\n{}\n\nPlease enter the number of the paragraph that "
        'the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", '
        "etc.\n\nThe answer is: ",
        32,
        same_number,
    ),
    "lcc": _CODE._replace(after="Next line of code:\n"),  # The context ends where code is asked.
    "repobench-p": _CODE,
}
_CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")


@dataclass(frozen=True, kw_only=True)
class AnswersConfig(ReadingOptions):
    """LongBench with its own prompts and scores."""

    data: str | None = None
    """LongBench's data.zip or a folder of TASK.jsonl files, here or on the hub
    (hf://datasets/THUDM/LongBench/data.zip)."""
    tasks: tuple[str, ...] = tuple(ANSWER_TASKS)
    """Tasks. The Chinese ones need a program that cuts Chinese into words, and are not offered."""
    max_samples: int | None = None
    """Samples of each task at most."""
    max_tokens: int | None = None
    """Longer prompts lose their middle, as in the published program. None: read whole."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for task in self.tasks:
            if task in _CHINESE:
                raise ValueError(
                    f"tasks: {task!r} is Chinese, and its score needs a program that cuts Chinese "
                    f"into words; choose among {', '.join(ANSWER_TASKS)}."
                )
        check_names(self, ANSWER_TASKS, "tasks")
        check_least(self, 1, "max_samples")
        check_least(self, 2, "max_tokens")
        if not self.tasks:
            raise ValueError(f"tasks=(): choose among {', '.join(ANSWER_TASKS)}.")


def evaluate(
    subject: Subject, config: AnswersConfig, *, tokenizer: Tokenizer | None = None
) -> Outcome:
    """LongBench's score of each task, for greedy answers.

    Args:
      subject: the model and its memory, of which the first group is used.
      config: tasks and protocol.
      tokenizer: the model's tokenizer; None: the run's.

    Returns:
      See `ask`. The score of an answer is the best over its references: F1 over words, ROUGE-L, the
      class or number named, or the similarity of code.

    Raises:
      ValueError: no data are named, a record lacks a field, or a task has no sample.
      FileNotFoundError: the data do not hold a task.
    """
    check_one_device(subject.partition, "longbench_answers")
    if config.data is None:
        raise ValueError("data=None: name LongBench, as in --longbench_answers.data data.zip.")
    path = local_path(config.data)
    files = task_files(path, config.tasks)
    tokenizer = load_tokenizer(subject.text.tokenizer) if tokenizer is None else tokenizer
    groups = []
    for name in config.tasks:
        task = ANSWER_TASKS[name]
        classes: dict[str, list[str]] = {}
        questions = []
        with open_task(path, name) as lines:
            records = read_json_lines(lines, name=f"{path} ({name})")
            for number, record in itertools.islice(records, config.max_samples):
                place = f"{path} ({name}), line {number}"
                one = _question(task, record, f"{name}:{number}", place=place)
                questions.append(one)
                classes[one.id] = record.get("all_classes") or []
        if not questions:
            raise ValueError(f"LongBench: {path} holds no sample of {name}.")
        groups.append(
            Group(
                name,
                None,
                questions,
                task.new_tokens,
                scorer(task, classes),
                ended=_has_line if task.first_line else lambda answer: False,
                max_tokens=config.max_tokens,
            )
        )
    hashes = {str(file): sha256(file) for file in files}
    return ask(subject, config, groups, tokenizer=tokenizer, name="longbench_answers", files=hashes)


def scorer(task: Task, classes: dict[str, list[str]]) -> Callable[[Question, str], float]:
    """The score of an answer: the best over its references.

    Args:
      task: how an answer is scored.
      classes: the names that a sample's answer may give, by its id; only for `named_class`.
    """

    def score(question: Question, answer: str) -> float:
        if task.first_line:
            answer = answer.lstrip("\n").split("\n")[0]
        more = (classes[question.id],) if task.score is named_class else ()
        return max(task.score(answer, reference, *more) for reference in question.references)

    return score


def _has_line(answer: str) -> bool:
    return "\n" in answer.lstrip("\n")


def _question(task: Task, record: dict[str, Any], id: str, *, place: str) -> Question:
    context, asked = (text_field(record, field, place=place) for field in ("context", "input"))
    answers = record.get("answers")
    if not isinstance(answers, list) or not answers or not all(isinstance(x, str) for x in answers):
        raise ValueError(f"{place}: field 'answers' is {answers!r:.60}, not a list of texts.")
    before, after = task.before + context, task.after.replace("{}", asked)
    return Question(before, after, tuple(answers), str(record.get("_id") or id))


def _missing(subject: Subject, config: AnswersConfig) -> str | None:
    if subject.partition is not None:
        return "a single device"
    return None if config.data else "LongBench (--longbench_answers.data PATH)"


LONGBENCH_ANSWERS = Evaluation(
    name="longbench_answers",
    config=AnswersConfig,
    evaluate=evaluate,
    limit="max_samples",
    title="LongBench with its own scores",
    about=(
        "The model reads a long text and a question and answers in its own words, which are scored "
        "as LongBench does: words in common, ROUGE-L for summaries, the named class or number, the "
        "similarity of code. The same texts are read with the memory writing and with it frozen."
    ),
    table=views.table,
    plot=views.plot_of("longbench_answers", "LongBench by task"),
    finding=views.finding,
    missing=_missing,
)
