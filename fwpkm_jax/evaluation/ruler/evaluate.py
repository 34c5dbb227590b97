"""Scores of RULER's tasks at chosen lengths, with the memory writing and frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fwpkm_jax.data import Tokenizer, load_tokenizer
from fwpkm_jax.evaluation.data_files import local_path
from fwpkm_jax.evaluation.interface import Evaluation, Outcome, Subject
from fwpkm_jax.evaluation.option_checks import check_least, check_names
from fwpkm_jax.evaluation.questions import views
from fwpkm_jax.evaluation.questions.asking import Group, Question, ReadingOptions, ask
from fwpkm_jax.evaluation.questions.texts import read_texts
from fwpkm_jax.evaluation.readers.batch_reader import check_one_device
from fwpkm_jax.evaluation.ruler.documents import READERS
from fwpkm_jax.evaluation.ruler.prompts import GENERATED_TASKS, NEW_TOKENS, QUESTION_TASKS, TASKS
from fwpkm_jax.evaluation.ruler.samples import Material, make_samples, words_of
from fwpkm_jax.evaluation.sources import sha256


@dataclass(frozen=True, kw_only=True)
class RulerConfig(ReadingOptions):
    """RULER."""

    tasks: tuple[str, ...] = ()
    """Tasks. Empty: the eleven that need no data, and those of questions whose data are named."""
    lengths: tuple[int, ...] = ()
    """Tokens of a prompt and its answer together, by the run's tokenizer, as 4096 8192."""
    samples: int = 500
    """Samples of each task and length."""
    essay: str | None = None
    """A .txt or .jsonl file, here or on the hub (hf://datasets/OWNER/NAME/FILE), whose text hides
    the needles. None: the books of this package; RULER takes essays by Paul Graham."""
    words: str | None = None
    """A file of text whose words are drawn for keys and lists. None: those of this package."""
    squad: str | None = None
    """SQuAD 2's file of questions, for qa_1."""
    hotpotqa: str | None = None
    """HotpotQA's file of questions in the distractor setting, for qa_2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names(self, TASKS, "tasks")
        check_least(self, 1, "samples")
        if self.lengths and min(self.lengths) < 1:
            raise ValueError(f"lengths={self.lengths} must be numbers of at least 1.")
        for task, option in QUESTION_TASKS.items():
            if task in self.tasks and getattr(self, option) is None:
                raise ValueError(f"{task} needs data; name {option}, as --ruler.{option} PATH.")

    @property
    def chosen_tasks(self) -> tuple[str, ...]:
        """The tasks to run."""
        given = [task for task, option in QUESTION_TASKS.items() if getattr(self, option)]
        return self.tasks or (*GENERATED_TASKS, *given)


def evaluate(
    subject: Subject, config: RulerConfig, *, tokenizer: Tokenizer | None = None
) -> Outcome:
    """Share of the right answers that the model names, by task and length.

    Samples are those of the published program in kind, not in their random draws: texts, keys and
    values are drawn from the subject's seed.

    Args:
      subject: the model and its memory, of which the first group is used; its seed is the samples'.
      config: tasks and protocol.
      tokenizer: the model's tokenizer; None: the run's.

    Returns:
      See `ask`. A score is the share of a sample's references that the answer contains in any case;
      of questions about documents, whether it contains one of them.

    Raises:
      ValueError: no length is named or one is too short for a task, or a file is none of its kind.
    """
    check_one_device(subject.partition, "ruler")
    if not config.lengths:
        raise ValueError("lengths=(): name lengths in tokens, as in --ruler.lengths 4096 8192.")
    tokenizer = load_tokenizer(subject.text.tokenizer) if tokenizer is None else tokenizer
    material, files = _material(config)
    groups = [
        Group(
            task,
            length,
            make_samples(
                task,
                length=length,
                number=config.samples,
                seed=subject.seed,
                tokenizer=tokenizer,
                material=material,
            ),
            NEW_TOKENS[task],
            any_reference if task in QUESTION_TASKS else share_of_references,
        )
        for task in config.chosen_tasks
        for length in config.lengths
    ]
    return ask(subject, config, groups, tokenizer=tokenizer, name="ruler", files=files)


def share_of_references(question: Question, answer: str) -> float:
    """The share of the references that an answer contains, in capital or small letters."""
    return sum(_holds(answer, one) for one in question.references) / len(question.references)


def any_reference(question: Question, answer: str) -> float:
    """1 if an answer contains one of the references, else 0."""
    return float(any(_holds(answer, one) for one in question.references))


def _holds(answer: str, reference: str) -> bool:
    return reference.lower() in answer.lower()


def _material(config: RulerConfig) -> tuple[Material, dict[str, str]]:
    """What samples are made of, and SHA-256 of the files by path."""
    files: dict[str, str] = {}

    def text(name: str | None) -> str:
        texts, hashes = read_texts(name)
        files.update(hashes)
        found = "\n".join(texts)
        if not found.split():
            raise ValueError(f"{name} holds no words; name a file of text.")
        return found

    documents: dict[str, Any] = {}
    for task, option in QUESTION_TASKS.items():
        name = getattr(config, option)
        if name is not None and task in config.chosen_tasks:
            path = local_path(name)
            files[name] = sha256(path)
            documents[task] = READERS[option](path)
    words = words_of(text(config.words))
    if len(words) < 40:
        raise ValueError(
            f"words={config.words!r} has {len(words)} words of 3 to 12 small letters; 40 or more "
            "are drawn."
        )
    return Material(text(config.essay).split(), words, documents), files


def _missing(subject: Subject, config: RulerConfig) -> str | None:
    if subject.partition is not None:
        return "a single device"
    return None if config.lengths else "lengths in tokens (--ruler.lengths N ...)"


RULER = Evaluation(
    name="ruler",
    config=RulerConfig,
    evaluate=evaluate,
    limit="samples",
    title="RULER",
    about=(
        "Long texts hide numbers, chains of assignments or words that are frequent; the model "
        "reads a text and is asked for them. The score is the share of right answers it names. "
        "The same texts are read with the memory writing and with it frozen."
    ),
    table=views.table,
    plot=views.plot_of("ruler", "RULER by task and length"),
    finding=views.finding,
    missing=_missing,
)
