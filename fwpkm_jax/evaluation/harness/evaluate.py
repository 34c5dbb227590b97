"""Runs tasks of lm-evaluation-harness on a run, once with the memory writing and once frozen."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fwpkm_jax.data import Tokenizer, load_tokenizer
from fwpkm_jax.evaluation.harness import views
from fwpkm_jax.evaluation.interface import Evaluation, Outcome, Subject
from fwpkm_jax.evaluation.option_checks import check_least
from fwpkm_jax.evaluation.readers.batch_reader import MemoryReset, check_one_device, passes_of
from fwpkm_jax.evaluation.record import describe_resets
from fwpkm_jax.literals import check_literals, nearest


@dataclass(frozen=True, kw_only=True)
class HarnessConfig:
    """Tasks of lm-evaluation-harness."""

    tasks: tuple[str, ...] = ()
    """Names of tasks or groups, or YAML files of tasks."""
    include_path: str | None = None
    """A folder of YAML files with further tasks."""
    num_fewshot: int | None = None
    """Solved examples in front of each question; None: what the task says."""
    write: Literal["both", "on", "off"] = "both"
    """Write the memory while reading, keep it frozen, or do one after the other and compare."""
    memory_reset: MemoryReset = "text"
    """text: every request starts from the checkpoint's memory. never: the memory goes on from
    request to request, in the harness' order; needs a batch size of 1."""
    batch_size: int = 8
    """Requests read side by side; each has its own copy of a memory that is written."""
    max_length: int | None = None
    """Tokens that a request may have; longer contexts lose their start. None: read whole."""
    add_bos: bool = False
    """Put the tokenizer's first token in front of every context, as the harness' own backend does
    for tokenizers that add it (Llama's)."""
    chunk_size: int | None = None
    """Tokens per write. None: the model's."""
    piece_length: int = 512
    """Tokens read per call; limits the device memory needed and does not change results."""
    max_documents: int | None = None
    """Documents of each task at most."""
    bootstrap_iters: int = 100_000
    """Resamples for the standard errors of scores that have no formula; 0: no standard errors."""

    def __post_init__(self) -> None:
        check_literals(self)
        check_least(self, 1, "batch_size", "chunk_size", "piece_length", "max_documents")
        check_least(self, 0, "num_fewshot", "bootstrap_iters")
        check_least(self, 2, "max_length")


def evaluate(
    subject: Subject, config: HarnessConfig, *, tokenizer: Tokenizer | None = None
) -> Outcome:
    """What the harness reports of each task, with the memory writing and frozen.

    Args:
      subject: the model and its memory, of which the first group is used.
      config: the tasks and the protocol.
      tokenizer: the model's tokenizer; None: the run's.

    Returns:
      Numbers are `writing` and `frozen`: for each task or group its `metrics` (name, value,
      standard error or None), `documents`, `version` and `num_fewshot`; and `lm_eval`, the
      harness' version.

    Raises:
      ImportError: the harness is not installed.
      ValueError: there is no such task, no task is named, or the harness cannot run one.
    """
    check_one_device(subject.partition, "lm_eval")
    if not config.tasks:
        raise ValueError("tasks=(): name tasks of the harness, as in --tasks lambada_openai.")
    adapter = importlib.import_module("fwpkm_jax.evaluation.harness.adapter")
    if adapter.MISSING is not None:
        raise ImportError(adapter.INSTALL) from adapter.MISSING
    tokenizer = load_tokenizer(subject.text.tokenizer) if tokenizer is None else tokenizer
    began, results, scored = time.monotonic(), {}, 0
    manager = _task_manager(config)
    for name, write in passes_of(config.write):
        model = adapter.HarnessModel(
            subject.model,
            subject.memory,
            tokenizer,
            write=write,
            memory_reset=config.memory_reset,
            batch_size=config.batch_size,
            max_length=config.max_length,
            add_bos=config.add_bos,
            chunk_size=config.chunk_size,
            piece_length=config.piece_length,
        )
        results[name] = _run(model, manager, config)
        scored = model.scored_tokens
    version = importlib.metadata.version("lm_eval")
    return Outcome(
        numbers=results | {"lm_eval": version, "seconds": time.monotonic() - began},
        scored_tokens=scored,
        mode=f"lm-evaluation-harness {version}",
        resets=describe_resets(
            subject.memory,
            fast_weights="request" if config.memory_reset == "text" else "never",
            queue="request",
            caches="request",
        ),
        chunk_size=config.chunk_size,
    )


def _task_manager(config: HarnessConfig) -> Any:
    """The harness' index of tasks, with those of `include_path`; refuses unknown names."""
    if config.include_path is not None and not Path(config.include_path).is_dir():
        raise ValueError(
            f"include_path={config.include_path!r} is no folder; name the folder of the tasks' "
            "YAML files."
        )
    manager = importlib.import_module("lm_eval.tasks").TaskManager(include_path=config.include_path)
    known = list(manager.all_tasks)
    for name in config.tasks:
        if Path(name).suffix in (".yaml", ".yml"):
            if not Path(name).is_file():
                raise ValueError(f"tasks: there is no file {name}.")
        elif name not in known:
            raise ValueError(
                f"tasks: {name!r} is none of the harness' {len(known):,} tasks"
                f"{nearest(name, known)}. Tasks of your own need include_path."
            )
    return manager


def _run(model: Any, manager: Any, config: HarnessConfig) -> dict[str, Any]:
    with _refusals():
        found = importlib.import_module("lm_eval").simple_evaluate(
            model=model,
            tasks=list(config.tasks),
            num_fewshot=config.num_fewshot,
            limit=config.max_documents,
            bootstrap_iters=config.bootstrap_iters,
            log_samples=False,
            task_manager=manager,
        )
    samples, shots = found.get("n-samples", {}), found.get("n-shot", {})
    return {
        task: {
            "metrics": _metrics(scores),
            "documents": samples.get(task, {}).get("effective"),
            "version": found.get("versions", {}).get(task),
            "num_fewshot": shots.get(task),
        }
        for task, scores in found["results"].items()
    }


def _metrics(scores: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The numbers of a task; keys of the harness are `metric,filter` and `metric_stderr,filter`."""
    found = []
    for key, value in scores.items():
        metric, _, chosen = key.partition(",")
        if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = scores.get(f"{metric}_stderr,{chosen}")
        found.append(
            {
                "metric": metric,
                "filter": chosen,
                "value": float(value),
                "standard_error": float(error) if isinstance(error, int | float) else None,
            }
        )
    return found


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Says in one line what data the harness could not have."""
    try:
        yield
    except (ConnectionError, FileNotFoundError) as error:
        raise OSError(
            f"The data of a task cannot be had ({type(error).__name__}: {error!s:.200}); "
            "connect to the hub once, or give the task local files in its dataset_kwargs."
        ) from error


def _missing(subject: Subject, config: HarnessConfig) -> str | None:
    if subject.partition is not None:
        return "a single device"
    if importlib.util.find_spec("lm_eval") is None:
        return "lm-evaluation-harness (extra lm-eval)"
    return None if config.tasks else "tasks (--lm_eval.tasks NAME ...)"


HARNESS = Evaluation(
    name="lm_eval",
    config=HarnessConfig,
    evaluate=evaluate,
    limit="max_documents",
    title="Tasks of lm-evaluation-harness",
    about=(
        "The tasks, prompts and scores are those of lm-evaluation-harness; the model answers "
        "through this package. Each request is read once with the memory writing and once frozen; "
        "the difference is what writing while reading adds to the task."
    ),
    table=views.table,
    finding=views.finding,
    missing=_missing,
)
