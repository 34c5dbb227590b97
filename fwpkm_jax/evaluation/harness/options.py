"""Options of the tasks of lm-evaluation-harness."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fwpkm_jax.evaluation.interface import Passes
from fwpkm_jax.evaluation.readers.batch_reader import ReadingOptions
from fwpkm_jax.literals import Bound, Count, Natural


@dataclass(frozen=True, kw_only=True)
class HarnessConfig(ReadingOptions):
    """Tasks of lm-evaluation-harness."""

    tasks: tuple[str, ...] = ()
    """Names of tasks or groups, or YAML files of tasks."""
    include_path: str | None = None
    """A folder of YAML files with further tasks. They may name Python functions, which run."""
    metadata: str | None = None
    """What tasks that generate their texts are told, as JSON: '{"max_seq_lengths": [4096]}' for
    RULER. The tokenizer is the run's where it is a tokenizer.json; else add "tokenizer"."""
    data: tuple[str, ...] = ()
    """TASK=FILE: a task's documents from a local file of JSON lines in place of the hub. For tasks
    of LongBench also its data.zip or a folder of it."""
    num_fewshot: Natural | None = None
    """Solved examples in front of each question; None: what the task says."""
    question_from: str | None = None
    """The words that begin a question. The last place where a context has them parts the document
    from the question; the document is written to its end before the question is read."""
    write: Passes = "both"
    """Write the memory while reading, keep it frozen, or do one after the other and compare."""
    yarn_factor: float | None = None
    """YaRN's factor for rotary positions. None: positions as trained."""
    yarn_original_length: Count = 1024
    """YaRN's original context length."""
    max_length: Annotated[int, Bound(2)] | None = None
    """Tokens that a request may have; longer contexts lose their start, and rolling texts are cut
    into windows, between which the memory goes on. None: read whole."""
    add_bos: bool = False
    """Put the tokenizer's first token in front of every context, as the harness' own backend does
    for tokenizers that add it (Llama's)."""
    max_documents: Count | None = None
    """Documents of each task at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.question_from == "":
            raise ValueError("question_from='' begins no question; give its first words.")
        if self.question_from is None and (self.readings > 1 or self.attention == "question"):
            raise ValueError(
                f"readings={self.readings} and attention={self.attention!r} need to know where the "
                "document ends; name the words that begin the question, as in --lm_eval."
                "question_from Question:"
            )
        _ = self.parsed_metadata, self.local_files  # Checked here.

    @property
    def parsed_metadata(self) -> Mapping[str, Any]:
        """What `metadata` says."""
        try:
            found = json.loads(self.metadata or "{}")
        except ValueError as error:
            raise ValueError(f"metadata={self.metadata!r} is no JSON ({error}).") from error
        if not isinstance(found, dict):
            raise ValueError(f'metadata={self.metadata!r} must be an object, as {{"words": 1000}}.')
        return found

    @property
    def local_files(self) -> dict[str, Path]:
        """The files of `data` by task."""
        found = {}
        for one in self.data:
            task, given, path = one.partition("=")
            if not (task and given and path):
                raise ValueError(f"data: {one!r} is not of the form TASK=FILE.")
            found[task] = Path(path).expanduser()
        return found
