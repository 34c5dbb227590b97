"""The interface of evaluations: what they receive, what they give, and how they are registered."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fwpkm_jax.data import AbstractDataConfig, TextData, load_tokenizer
from fwpkm_jax.evaluation.readers.fast_weight_dtype import FastWeightDtype
from fwpkm_jax.evaluation.record import Origin, Result, first_group, make_result
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.literals import Checked
from fwpkm_jax.models.language_model import LanguageModel, Memory

Passes = Literal["both", "on", "off"]
"""Texts are read with the memory writing, with it frozen, or once each way."""


def passes_of(write: Passes) -> tuple[tuple[str, bool], ...]:
    """Names of the passes that an option `write` asks for, and whether each writes."""
    passes = (("writing", True), ("frozen", False))
    return {"both": passes, "on": passes[:1], "off": passes[1:]}[write]


@dataclass(frozen=True, kw_only=True)
class Subject(Checked):
    """What is evaluated: a trained model, its memory, and how they were trained."""

    model: LanguageModel
    """The model with its slow weights."""
    memory: Memory
    """The checkpoint's fast weights, leaves `[groups, ...]`."""
    data: AbstractDataConfig | None = None
    """The data it was trained on. None: the evaluation is given its texts."""
    lifetime: Literal["carried", "batch"] = "carried"
    """How long memories lived in training."""
    groups: int = 1
    """Memories per batch in training."""
    batch_size: int = 1
    """Sequences per batch in training."""
    seed: int = 0
    """The run's seed."""
    origin: Origin = field(default_factory=Origin)
    """Where model and memory come from."""
    partition: Partition | None = None
    """The devices that share the work; None: one device."""
    text_paths: tuple[str, ...] = ()
    """Files or folders of text, one data set each, that evaluations of text read in place of the
    run's validation text."""
    fast_weight_dtype: FastWeightDtype = "float32"
    """Precision of fast weights between calls of the model; bfloat16 rounds them after each, as the
    authors' release does."""

    @property
    def text(self) -> TextData:
        """The text that evaluations read: that of `data`, or `text_paths` if given.

        `choose_suite` guarantees that evaluations of text have one.
        """
        text = None if self.data is None else self.data.text
        if text is None:
            raise ValueError(
                f"data={type(self.data).__name__} has no text; evaluate a run on text, or give "
                "the evaluation its texts."
            )
        return dataclasses.replace(text, valid_paths=self.text_paths) if self.text_paths else text

    @property
    def first_memory(self) -> Memory:
        """The fast weights of the checkpoint's first group, leaves `[1, ...]`."""
        return first_group(self.memory)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an evaluation gives: its numbers, and what a reader must know to compare them."""

    numbers: Mapping[str, Any]
    """JSON values or NumPy's, finite; the `results` of the record."""
    scored_tokens: int
    """Number of labels or answer tokens behind the numbers."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Data per token or per answer, too long for JSON."""
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of every file read, by path."""
    mode: str = ""
    """Variant of the protocol."""
    resets: Mapping[str, Any] = field(default_factory=dict)
    """What was reset when; see `describe_resets`."""
    chunk_size: int | str | None = None
    """Tokens per write, or a description if it varies; None: the model's."""
    model: LanguageModel | None = None
    """The model as it was run, if that is another than the subject's."""


@dataclass(frozen=True, kw_only=True)
class Evaluation(Checked):
    """A named evaluation: its options, the function that measures, and the views of the outcome.

    Views take the record of a result, as its file holds it: `evaluation`, `provenance`, `config`
    (the options) and `results` (the numbers).
    """

    name: str
    """Its name on the command line, in records and of its files."""
    config: type
    """Frozen dataclass of its options, every field with a default."""
    evaluate: Callable[..., Outcome]
    """Takes a subject, of whose memory the first group is used unless it says otherwise, and
    options. May take inputs by name, such as texts in hand."""
    data: Literal["text", "questions"] = "text"
    """What the run's data must offer: text, or questions with a known number of answers."""
    limit: str
    """The option that bounds how much is scored."""
    title: str
    """The evaluation's heading in a report."""
    about: str
    """What it measures and how to read it, in plain sentences without terms of the paper."""
    table: Callable[[Mapping[str, Any]], str]
    """Formats a record as a text table."""
    plot: Callable[[Mapping[str, Any], Path], list[Path]] = lambda record, directory: []
    """Draws a record as PNG or HTML files in a directory and returns their paths."""
    finding: Callable[[Mapping[str, Any]], str] = lambda record: ""
    """Summarises a record in a sentence; empty if the table suffices."""
    controls: str | None = None
    """Of an evaluation that reports recall: which controls its table has, or "none"; it is printed
    below the table and in the report. None: it reports no recall."""
    missing: Callable[[Subject, Any], str | None] = lambda subject, config: None
    """Names in a few words what the run or the options lack for this evaluation; None if it can
    run. `--suite all` skips an evaluation that lacks something; an evaluation that was asked for by
    name fails instead."""
    one_stream: bool = True
    """Whether it reads one sequence at a time, of which devices share the tokens; False: batches of
    rows, which they share, too."""

    def controls_line(self) -> str:
        """What is printed of the controls; empty for an evaluation that reports no recall."""
        if self.controls is None:
            return ""
        return f"Controls: {self.controls}. fwpkm audit RUN checks where answers come from."

    def suits(self, data: AbstractDataConfig | None) -> bool:
        """Whether this evaluation can be applied to runs on these data."""
        if data is None:
            return False
        return (data.text if self.data == "text" else data.num_answers) is not None

    def run(self, subject: Subject, config: Any, **inputs: Any) -> Result:
        """The result of evaluating a subject: numbers, options and provenance.

        Args:
          subject: model, memory and how they were trained.
          config: the options.
          **inputs: inputs in hand that `evaluate` takes by name, in place of the run's files.

        Raises:
          ValueError: the evaluation refuses the subject or the options, or a number is not finite.
        """
        outcome = self.evaluate(subject, config, **inputs)
        if not isinstance(outcome, Outcome):
            raise TypeError(f"{self.name}: evaluate gave {type(outcome).__name__}, no Outcome.")
        tokenizer = subject.origin.tokenizer
        if self.data == "text" and subject.data is not None:
            tokenizer = load_tokenizer(subject.text.tokenizer).fingerprint
        return make_result(self.name, subject, config, outcome, tokenizer=tokenizer)

    def of_model(
        self, model: LanguageModel, memory: Memory, *, config: Any, **inputs: Any
    ) -> Result:
        """The result for a model in hand rather than a run.

        Args:
          model: the language model.
          memory: fast weights to start from, leaves `[groups, ...]`.
          config: the options.
          **inputs: other fields of `Subject`, and the inputs that `evaluate` takes by name.
        """
        fields = {one.name for one in dataclasses.fields(Subject)}
        about = {name: inputs.pop(name) for name in fields & inputs.keys()}
        return self.run(Subject(model=model, memory=memory, **about), config, **inputs)
