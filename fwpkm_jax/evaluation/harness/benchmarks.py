"""Runs tasks of lm-evaluation-harness on a run, once with the memory writing and once frozen."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fwpkm_jax.data import Tokenizer, load_tokenizer
from fwpkm_jax.evaluation.harness import harness_views as views
from fwpkm_jax.evaluation.harness.local_data import file_of, with_local_data
from fwpkm_jax.evaluation.harness.options import HarnessConfig
from fwpkm_jax.evaluation.interface import Evaluation, Outcome, Subject, passes_of
from fwpkm_jax.evaluation.reconfigure import with_yarn
from fwpkm_jax.evaluation.record import describe_resets
from fwpkm_jax.evaluation.sources import sha256
from fwpkm_jax.literals import nearest

_RESAMPLES = 1000
"""For the standard errors of scores that have no formula."""


def evaluate(
    subject: Subject, config: HarnessConfig, *, tokenizer: Tokenizer | None = None
) -> Outcome:
    """What the harness reports of each task, with the memory writing and frozen.

    Args:
      tokenizer: the model's tokenizer; None: the run's.

    Returns:
      Numbers are `writing` and `frozen`: for each task or group its `metrics` (name, value,
      standard error or None), `documents`, `version` and `num_fewshot`; and `lm_eval`, the
      harness' version.

    Raises:
      ImportError: the harness is not installed.
      ValueError: there is no such task, no task is named, or the harness cannot run one.
    """
    if subject.partition is not None:
        raise ValueError("lm_eval reads its texts on one device; leave out --mesh.")
    if subject.fast_weight_dtype != "float32":
        raise ValueError(
            f"fast_weight_dtype={subject.fast_weight_dtype!r}: lm_eval keeps memories as they are; "
            "leave it out."
        )
    if not config.tasks:
        raise ValueError("tasks=(): name tasks, as in --lm_eval.tasks lambada_openai.")
    adapter = importlib.import_module("fwpkm_jax.evaluation.harness.adapter")
    if adapter.MISSING is not None:
        raise ImportError(adapter.INSTALL) from adapter.MISSING
    name = subject.text.tokenizer if subject.data is not None else ""
    tokenizer = load_tokenizer(name) if tokenizer is None else tokenizer
    stretched = with_yarn(
        subject.model, factor=config.yarn_factor, original_length=config.yarn_original_length
    )
    files = [file_of(*one) for one in config.local_files.items()]
    began, results, scored = time.monotonic(), {}, 0
    with tempfile.TemporaryDirectory() as folder:
        manager = _task_manager(config, tokenizer=name)
        tasks = with_local_data(config, manager.task_index, Path(folder))
        for one, write in passes_of(config.write):
            model = adapter.HarnessModel(stretched, subject.memory, tokenizer, config, write=write)
            results[one] = _run(model, manager, config, tasks)
            scored = model.scored_tokens
    version = importlib.metadata.version("lm_eval")
    return Outcome(
        numbers=results | {"lm_eval": version, "seconds": time.monotonic() - began},
        scored_tokens=scored,
        files={str(path): sha256(path) for path in files},
        mode=f"lm-evaluation-harness {version}",
        resets=describe_resets(
            subject.memory,
            fast_weights="request" if config.memory_reset == "text" else "never",
            queue="request",
            caches="request" if config.attention == "document" else "question",
        ),
        chunk_size=config.chunk_size,
        model=stretched,
    )


def _task_manager(config: HarnessConfig, *, tokenizer: str) -> Any:
    """The harness' index of tasks, with those of this package and of `include_path`.

    Args:
      tokenizer: the run's, which tasks that generate texts measure them by.

    Raises:
      ValueError: a name is unknown, or a folder or file is missing.
    """
    if config.include_path is not None and not Path(config.include_path).is_dir():
        raise ValueError(
            f"include_path={config.include_path!r} is no folder; name the folder of the tasks' "
            "YAML files."
        )
    metadata = dict(config.parsed_metadata)
    if Path(tokenizer).name == "tokenizer.json":
        metadata.setdefault("tokenizer", str(Path(tokenizer).parent))
    folders = [str(Path(__file__).parent), *filter(None, [config.include_path])]
    manager = importlib.import_module("lm_eval.tasks").TaskManager(
        include_path=folders, metadata=metadata
    )
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


def _run(model: Any, manager: Any, config: HarnessConfig, tasks: Sequence[str]) -> dict[str, Any]:
    # Else the harness forks for its resamples, and a fork beside JAX's threads may hang.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    with _refusals():
        found = importlib.import_module("lm_eval").simple_evaluate(
            model=model,
            tasks=list(tasks),
            num_fewshot=config.num_fewshot,
            limit=config.max_documents,
            bootstrap_iters=_RESAMPLES,
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
            "connect to the hub once, or name a local file, as in --lm_eval.data TASK=FILE."
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
