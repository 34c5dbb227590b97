"""The audit of a model or run: all lines, in the order in which they are found."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np

from fwpkm_jax.audit.asking import answers_of, other_paths
from fwpkm_jax.audit.indices import indices
from fwpkm_jax.audit.lines import Line, attempt, refused, shown
from fwpkm_jax.audit.model_paths import chat_causality, model_lines
from fwpkm_jax.audit.origin import Answer, origin_lines
from fwpkm_jax.audit.questions import questions_of
from fwpkm_jax.audit.stability import stability
from fwpkm_jax.evaluation.interface import Subject
from fwpkm_jax.literals import Bound, Checked, Count
from fwpkm_jax.memories.file import checksum
from fwpkm_jax.memories.saved import fingerprint
from fwpkm_jax.run.evaluate import subject_of
from fwpkm_jax.run.load import Run
from fwpkm_jax.training.runs.run_directory import environment
from fwpkm_jax.training.state import named_leaves


@dataclass(frozen=True, kw_only=True)
class AuditConfig(Checked):
    """How much an audit reads."""

    texts: Annotated[int, Bound(2)] = 16
    """Texts that state values, each with a memory of its own."""
    length: Count | None = None
    """Tokens of each. None: twice a row of training text, or a row of facts."""
    tokens: Count = 20_000
    """Length of the text over which all must stay finite."""


class Audit(NamedTuple):
    """What an audit found.

    Attributes:
      lines: in the order in which they were found.
      answers: what was said to every question under every condition.
    """

    lines: list[Line]
    answers: list[Answer]


def audit_model(
    subject: Subject,
    config: AuditConfig | None = None,
    *,
    others: Sequence[Subject] = (),
    show: Callable[[Line], None] = lambda line: None,
) -> Audit:
    """The audit of a model in hand.

    Args:
      subject: the model, its memory, of which the first group is used, and the data that it was
        trained on, which say what it is asked.
      config: how much is read; None: the defaults.
      others: models of other trainings of the same configuration, which are asked, too.
      show: called with each line when it is ready.
    """
    config = config or AuditConfig()
    answers: list[Answer] = []

    def origin() -> Iterator[Line]:
        try:
            questions = questions_of(
                subject.data, texts=config.texts, length=config.length, seed=subject.seed
            )
            for number, one in enumerate([subject, *others]):
                name = one.origin.run or f"model {number}"
                answers.extend(answers_of(one, questions, run=name))
        except (NotImplementedError, ValueError, FileNotFoundError) as error:
            yield refused("origin", "questions", error)
            return
        yield from origin_lines(answers)
        if subject.memory:
            name = "paths past the memory"
            yield attempt("origin", name, lambda: other_paths(subject, questions))

    stable = stability(subject, tokens=config.tokens)
    lines = itertools.chain(model_lines(subject), indices(subject), origin(), stable)
    return Audit(shown(lines, show), answers)


def audit_run(
    run: Run,
    config: AuditConfig | None = None,
    *,
    name: str,
    others: Mapping[str, Run] | None = None,
    show: Callable[[Line], None] = lambda line: None,
) -> Audit:
    """The audit of a run, that of its chat included.

    Args:
      run: from `load_run`.
      config: see `audit_model`.
      name: of the run, in the records.
      others: runs of other trainings by name.
      show: see `audit_model`.
    """
    chat = attempt("causality", "chat", lambda: chat_causality(run))
    show(chat)
    subjects = [subject_of(one, name=other) for other, one in (others or {}).items()]
    rest = audit_model(subject_of(run, name=name), config, others=subjects, show=show)
    return Audit([chat, *rest.lines], rest.answers)


def provenance_of(run: Run, *, name: str, command: Sequence[str]) -> dict[str, Any]:
    """What was audited, with hashes, and by which program: JSON values."""
    return {
        "run": name,
        "step": run.step,
        "config": run.experiment.fingerprint,
        "slow_weights": fingerprint(run.model),
        "memory": checksum({name: np.asarray(x) for name, x in named_leaves(run.memory).items()}),
    } | started_by(command)


def started_by(command: Sequence[str]) -> dict[str, Any]:
    """By which command an audit was made, when, and where: JSON values."""
    here = environment()
    return {
        "command": list(command),
        "started": here["started"],
        "commit": here["commit"] or "unknown",
        "device": f"{here['device_count']} {here['device_kind']}",
        "versions": here["versions"],
    }
