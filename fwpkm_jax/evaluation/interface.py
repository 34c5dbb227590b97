"""The interface of evaluations: what they receive and what they provide."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fwpkm_jax.data import AbstractDataConfig, TextData, Tokenizer
from fwpkm_jax.evaluation.record import Origin, Result
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.literals import check_literals
from fwpkm_jax.models.language_model import LanguageModel, Memory


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is evaluated: a trained model, its memory, and how they were trained."""

    model: LanguageModel
    """The model with its slow weights."""
    memory: Memory
    """The checkpoint's fast weights, leaves `[groups, ...]`."""
    data: AbstractDataConfig
    """The data it was trained on."""
    lifetime: Literal["carried", "batch"]
    """How long memories lived in training."""
    groups: int
    """Memories per batch in training."""
    batch_size: int
    """Sequences per batch in training."""
    seed: int = 0
    """The run's seed."""
    origin: Origin = field(default_factory=Origin)
    """Where model and memory come from."""
    partition: Partition | None = None
    """The devices that share the work; None: one device."""

    def __post_init__(self) -> None:
        check_literals(self)

    @property
    def text(self) -> TextData:
        """The text of `data`; `choose_suite` guarantees that evaluations of text have one."""
        text = self.data.text
        assert text is not None, "an evaluation of text was given other data"
        return text

    def origin_of(self, hashes: Iterable[Mapping[str, str]], tokenizer: Tokenizer) -> Origin:
        """The provenance of a result that read texts.

        Args:
          hashes: for each text, the SHA-256 of its files by path.
          tokenizer: the run's tokenizer.
        """
        files = {path: digest for each in hashes for path, digest in each.items()}
        return dataclasses.replace(self.origin, files=files, tokenizer=tokenizer.fingerprint)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A named evaluation: its options, the data it needs, how to run it and to show the outcome."""

    config: type
    """Frozen dataclass of its options, every field with a default."""
    data: Literal["text", "questions"]
    """What the run's data must offer: text, or questions with a known number of answers."""
    limit: str
    """The option that bounds how much is scored."""
    in_default_suite: bool = True
    """Whether it runs when the command line names no evaluation."""
    one_stream: bool = True
    """Whether it reads one sequence at a time, of which devices share the tokens; False: batches of
    rows, which they share, too."""
    run: Callable[[Subject, Any], Result]
    """Evaluates a subject with the given options."""
    table: Callable[[Mapping[str, Any]], str]
    """Formats a result's record as a text table."""
    plot: Callable[[Mapping[str, Any], Path], list[Path]]
    """Draws a result's record, writes the files into a directory and returns their paths."""
    title: str
    """The evaluation's heading in a report."""
    about: str
    """What it measures and how to read it, in plain sentences without terms of the paper."""
    finding: Callable[[Mapping[str, Any]], str] = lambda record: ""
    """Summarises a result's record in a sentence; empty if the table suffices."""
    missing: Callable[[Subject, Any], str | None] = lambda subject, config: None
    """Names in a few words what the run or the options lack for this evaluation; None if it can
    run. `--suite all` skips an evaluation that lacks something; an evaluation that was asked for by
    name fails instead."""

    def __post_init__(self):
        check_literals(self)

    def suits(self, data: AbstractDataConfig) -> bool:
        """Whether this evaluation can be applied to runs on these data."""
        return (data.text if self.data == "text" else data.num_answers) is not None
