"""A run's configuration: dataclasses from a Python file, and their JSON form.

A config file defines `get_config() -> Experiment`; `fwpkm_jax/configs` holds those that come with
the package. The JSON form goes into the run directory and into every checkpoint.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import inspect
import json
import runpy
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union

import numpy as np

from fwpkm_jax.command_line import nearest
from fwpkm_jax.data import RecallData, TextData
from fwpkm_jax.layers.partition import MeshConfig
from fwpkm_jax.models.language_model import ModelConfig
from fwpkm_jax.training.checkpoints.checkpoint import CheckpointConfig
from fwpkm_jax.training.config import WITHOUT_EFFECT, LogName, TrainingConfig
from fwpkm_jax.training.optimizer import OptimizerConfig
from fwpkm_jax.training.runs.processes import DistributedConfig
from fwpkm_jax.whole_files import read_json

# What the devices count and compute in.
_MOST_INT = 2**31 - 1
_MOST_FLOAT = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One training run, whole: the same experiment gives the same numbers again.

    Example:
      >>> from fwpkm_jax import Experiment, ModelConfig, RecallData
      >>> data = RecallData(length=64, num_facts=4, min_distance=16)
      >>> experiment = Experiment(
      ...     model=ModelConfig(vocab_size=data.vocab_size), data=data, run_dir="runs/mine"
      ... )
      >>> experiment.to_json()["data"]["num_facts"]
      4
    """

    seed: int = 0
    """Seed of parameters, initial fast weights and data order."""
    model: ModelConfig
    """The language model."""
    data: RecallData | TextData
    """Where batches come from; the config file chooses the kind of source."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimiser of the slow weights."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Length of the run, batches, memories."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """The devices that share the work; one by default."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """The processes that share it."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the run is saved, and what is kept."""
    log: tuple[LogName, ...] = ("tensorboard",)
    """Where metrics go, beside metrics.jsonl: event files for TensorBoard, Weights & Biases (needs
    the package wandb)."""
    profile: int | None = None
    """Steps of which a trace is written to RUN/profile, once the first few are done. None: none."""
    run_dir: str = "runs/default"
    """Directory the run writes to; a run that was interrupted there continues."""

    def __post_init__(self) -> None:
        """Checks the types and limits that are the same everywhere; sections check their own."""
        for name, hint in _hints(Experiment).items():
            from_json(to_json(getattr(self, name)), hint, path=name)
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be at least 0.")
        if self.profile is not None and self.profile < 1:
            raise ValueError(f"profile={self.profile} must be at least 1 step, or None for none.")

    def to_json(self) -> dict[str, Any]:
        """The experiment as JSON values; `from_json` gives it back."""
        return to_json(self)

    @property
    def fingerprint(self) -> str:
        """sha256 over everything that determines the run's numbers, as 64 hex digits."""
        values = self.to_json()
        for path in WITHOUT_EFFECT:
            *sections, name = path.split(".")
            section = values
            for part in sections:
                section = section[part]
            del section[name]
        canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()


def to_json(config: Any) -> Any:
    """JSON values of a dataclass tree; a dataclass carries its name under `class`."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = {f.name: to_json(getattr(config, f.name)) for f in dataclasses.fields(config)}
        return {"class": type(config).__name__, **fields}
    if isinstance(config, tuple | list):
        return [to_json(item) for item in config]
    if isinstance(config, float):
        return float(config)  # Not one of NumPy.
    if config is None or isinstance(config, bool | int | str):
        return config
    raise TypeError(f"{config!r} in a configuration has no JSON form.")


def from_json(values: Any, annotation: Any = Experiment, *, path: str = "config") -> Any:
    """The configuration that `to_json` wrote, every name and type checked.

    Args:
      values: parsed JSON.
      annotation: the type expected, a dataclass by default `Experiment`.
      path: what errors call the place.

    Raises:
      ValueError: a field or class is unknown (the nearest name is given), a required field is
        missing, a value has the wrong type, or a dataclass refuses its values.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return _from_json_union(values, arguments, path)
    if origin is Literal:
        if values not in arguments:
            hint = nearest(str(values), [str(a) for a in arguments])
            raise ValueError(f"{path}={values!r} is none of {list(arguments)}{hint}.")
        return values
    if origin is tuple:
        return _from_json_tuple(values, arguments, path)
    if _is_section(annotation):
        return _from_json_dataclass(values, annotation, path)
    if annotation is float and isinstance(values, int | float) and not isinstance(values, bool):
        if not abs(values) <= _MOST_FLOAT:
            raise ValueError(f"{path}={values!r} must be finite in float32.")
        return float(values)
    if annotation is type(None):
        annotation = types.NoneType
    if not isinstance(annotation, type) or type(values) is not annotation:
        raise ValueError(f"{path}={values!r} must be {getattr(annotation, '__name__', annotation)}")
    if annotation is int and abs(values) > _MOST_INT:
        raise ValueError(f"{path}={values!r} must lie within int32.")
    return values


def _from_json_union(values: Any, options: Sequence[Any], path: str) -> Any:
    """The value as the one of `options` it belongs to; dataclasses are told by their `class`."""
    if values is None and types.NoneType in options:
        return None
    if isinstance(values, dict):
        options = [o for o in options if _is_section(o)]
        classes = {cls.__name__: option for option in options for cls in _final_classes(option)}
        name = values.get("class")
        if name not in classes:
            raise ValueError(
                f"{path}.class={name!r} is none of {sorted(classes)}{nearest(str(name), classes)}."
            )
        return from_json(values, classes[name], path=path)
    errors = []
    for option in options:
        try:
            return from_json(values, option, path=path)
        except ValueError as error:
            errors.append(str(error))
    raise ValueError("; ".join(errors))


def _from_json_tuple(values: Any, items: Sequence[Any], path: str) -> tuple[Any, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{path}={values!r} must be a list.")
    if len(items) == 2 and items[1] is ...:
        items = [items[0]] * len(values)
    if len(items) != len(values):
        raise ValueError(f"{path}={values!r} must have {len(items)} entries.")
    pairs = zip(values, items, strict=True)
    return tuple(from_json(v, item, path=f"{path}[{i}]") for i, (v, item) in enumerate(pairs))


def _from_json_dataclass(values: Any, annotation: type, path: str) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{path}={values!r} must be an object with the fields of a section.")
    values = dict(values)
    classes = {cls.__name__: cls for cls in _final_classes(annotation)}
    name = values.pop("class", annotation.__name__)
    if name not in classes:
        hint = nearest(str(name), classes)
        raise ValueError(f"{path}.class={name!r} is none of {sorted(classes)}{hint}.")
    cls = classes[name]
    hints = _hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    for unknown in values.keys() - set(names):
        raise ValueError(f"{path}.{unknown} is not a field{nearest(unknown, names)}.")
    decoded = {n: from_json(v, hints[n], path=f"{path}.{n}") for n, v in values.items()}
    try:
        return cls(**decoded)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


_hints = functools.cache(typing.get_type_hints)  # Resolving them is slow.


def _final_classes(annotation: type) -> Iterator[type]:
    """The classes an annotation stands for: itself, or an interface's implementations."""
    if not inspect.isabstract(annotation):
        yield annotation
    for subclass in annotation.__subclasses__():
        yield from _final_classes(subclass)


def _is_section(annotation: Any) -> bool:
    """Whether the annotation is a dataclass, or an interface of which dataclasses are made."""
    if not isinstance(annotation, type):
        return False
    return dataclasses.is_dataclass(annotation) or inspect.isabstract(annotation)


CONFIGS = Path(__file__).parent / "configs"
"""The folder of the configs that come with the package."""


def shipped_configs() -> dict[str, Path]:
    """The config files that come with the package, by name: `recall`, `study/gdn_swa`."""
    files = sorted(path for path in CONFIGS.glob("**/*.py") if path.name != "__init__.py")
    return {path.relative_to(CONFIGS).with_suffix("").as_posix(): path for path in files}


def load_config(config: str | Path) -> Experiment:
    """The experiment of a shipped config or of a config file.

    Args:
      config: a name in `shipped_configs()`, or the path of a Python file, which ends in `.py` and
        defines `get_config() -> Experiment`. The file may import its neighbours.

    Raises:
      FileNotFoundError: no such name or file; the nearest name is given.
      ValueError: the file defines no `get_config`, or it returns something else.

    Example:
      >>> from fwpkm_jax import load_config
      >>> load_config("recall").run_dir
      'runs/recall'
    """
    path = _config_file(config)
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)  # As Python does for a program.
    try:
        get_config = runpy.run_path(str(path)).get("get_config")
        if get_config is None:
            raise ValueError(f"{path} defines no get_config(); a config file must.")
        experiment = get_config()
    finally:
        sys.path.remove(folder)
    if not isinstance(experiment, Experiment):
        raise ValueError(
            f"get_config() of {path} returned a {type(experiment).__name__}; "
            "it must return an Experiment."
        )
    return experiment


def _config_file(config: str | Path) -> Path:
    """The file of a shipped config's name, or of a path."""
    path, shipped = Path(config), shipped_configs()
    if path.suffix != ".py":
        if str(config) not in shipped:
            hint = nearest(str(config), shipped)
            if "=" in str(config):
                hint = "; an option starts with two hyphens: --section.field VALUE"
            raise FileNotFoundError(
                f"There is no shipped config {str(config)!r}{hint}. --help lists them; the path of "
                "a file ends in .py."
            )
        return shipped[str(config)]
    if path.is_file():
        return path
    beside = {p.stem: p for p in sorted(path.parent.glob("*.py"))} if path.parent.is_dir() else {}
    close = difflib.get_close_matches(path.stem, beside, n=1, cutoff=0.6)
    hint = f"; the nearest name is {beside[close[0]]}" if close else ""
    name = path.with_suffix("").as_posix().removeprefix("configs/")
    if name in shipped:
        hint = f"; the shipped config of that name is {name}"
    raise FileNotFoundError(f"There is no config file {path}{hint}.")


def read_experiment(run_dir: str | Path) -> Experiment:
    """The experiment a run directory was trained with, from its `config.json`.

    Raises:
      FileNotFoundError: there is no run.
      ValueError: this version of the code cannot read the configuration; the message names the
        commit that wrote it.
    """
    path = Path(run_dir) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; {run_dir} holds no run.")
    values = read_json(path, otherwise="put back a copy")
    try:
        return from_json(values, path=str(path))
    except ValueError as error:
        raise ValueError(
            f"{str(error).rstrip('.')}. Another version of fwpkm_jax wrote this run "
            f"({_commit_of(Path(run_dir))}); read it with that version."
        ) from error


def _commit_of(run_dir: Path) -> str:
    """The code of a run's first session, as `environment.json` tells."""
    path = run_dir / "environment.json"
    sessions = read_json(path).get("sessions") if path.is_file() else None
    commit = sessions[0].get("commit") if sessions else None
    return f"commit {commit}" if commit else "its commit was not recorded"
