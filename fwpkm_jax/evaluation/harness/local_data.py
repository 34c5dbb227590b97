"""Tasks of lm-evaluation-harness with documents of this machine."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fwpkm_jax.data.json_lines import read_json_lines
from fwpkm_jax.data.longbench import open_task, task_files
from fwpkm_jax.evaluation.harness.options import HarnessConfig

_LONGBENCH = "longbench_"  # What the harness' names of its tasks begin with.


def with_local_data(
    config: HarnessConfig, index: Mapping[str, Any], folder: Path
) -> tuple[str, ...]:
    """The tasks to run; those that `config.data` names as YAML files that read JSON lines.

    Args:
      config: tasks and their files, which hold the fields that the tasks name. The files of
        LongBench may be its archive or a folder of it, whose `input` the harness calls `question`.
      index: the harness' entries of tasks by name.
      folder: an empty one, for the files that are written.

    Raises:
      FileNotFoundError: there is no such file, or it does not hold the task.
      ValueError: data are given to a task that is not run, or a line is no record.
    """
    found = dict(zip(config.tasks, config.tasks, strict=True))
    for task, path in config.local_files.items():
        if task not in found or not getattr(index.get(task), "yaml_path", None):
            raise ValueError(f"data: {task!r} is no single task of lm_eval.tasks; name it there.")
        path = file_of(task, path)
        if task.startswith(_LONGBENCH):
            path = _published(path, task.removeprefix(_LONGBENCH), folder / f"{task}.jsonl")
        settings = {
            "include": str(index[task].yaml_path),
            "task": task,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": str(path.absolute())}},
            "custom_dataset": None,
            "test_split": "test",
            **dict.fromkeys(("training_split", "validation_split", "fewshot_split")),
        }
        written = folder / f"{task}.yaml"
        written.write_text(json.dumps(settings))  # JSON is YAML.
        found[task] = str(written)
    return tuple(found.values())


def file_of(task: str, path: Path) -> Path:
    """The file that holds a task's documents.

    Raises:
      FileNotFoundError: there is none.
    """
    if task.startswith(_LONGBENCH) and path.is_dir():
        (path,) = task_files(path, (task.removeprefix(_LONGBENCH),))
    if not path.is_file():
        raise FileNotFoundError(f"data: there is no file {path.absolute()} for {task}.")
    return path


def _published(path: Path, task: str, copy: Path) -> Path:
    """A copy of a task's published records with the harness' names of fields."""
    with open_task(path, task) as lines, copy.open("w") as file:
        for _, record in read_json_lines(lines, name=f"{path} ({task})"):
            file.write(json.dumps({"question": record.get("input"), **record}) + "\n")
    return copy
