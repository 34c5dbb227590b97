"""A run's configuration: dataclasses from a Python file, and their JSON form.

A config file defines `get_config() -> Experiment`; `fwpkm_jax/configs` holds those that come with
the package. The JSON form goes into the run directory and into every checkpoint.
"""

import contextlib
import hashlib
import json
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fwpkm_jax import config_json
from fwpkm_jax.config_json import to_json
from fwpkm_jax.data import AbstractDataConfig
from fwpkm_jax.io.untrusted import (
    MOST_JSON_BYTES,
    OutsideFileError,
    parse_json,
    read_json,
    shown,
)
from fwpkm_jax.layers.partition import MeshConfig
from fwpkm_jax.literals import Count, Natural, check_fields, nearest, some
from fwpkm_jax.models.language_model import ModelConfig
from fwpkm_jax.plugins import missing_plugins, refuse_unnamed
from fwpkm_jax.storage.addresses import address_of, check_store, read_small, scheme_of
from fwpkm_jax.training.checkpoints.checkpoint import CheckpointConfig
from fwpkm_jax.training.optimizer import OptimizerConfig
from fwpkm_jax.training.runs.processes import DistributedConfig
from fwpkm_jax.training.training_config import WITHOUT_EFFECT, LogName, TrainingConfig


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

    seed: Natural = 0
    """Seed of parameters, initial fast weights and data order."""
    model: ModelConfig
    """The language model."""
    data: AbstractDataConfig
    """Where batches come from; the config file chooses the kind of source."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimiser of the slow weights."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Length of the run, batches, memories."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """The devices that share the work; one by default."""
    distributed: DistributedConfig = field(
        default_factory=DistributedConfig, metadata={"stored": False}
    )
    """The processes that share it, at this start; it is not stored with the run."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the run is saved, and what is kept."""
    log: tuple[LogName, ...] = ("tensorboard",)
    """Where metrics go, beside metrics.jsonl: event files for TensorBoard, Weights & Biases (needs
    the package wandb)."""
    profile: Count | None = None
    """Steps of which a trace is written to RUN/profile, once the first few are done. None: none."""
    run_dir: str = "runs/default"
    """Directory the run writes to, also in a bucket (gs://, s3://); a run that was interrupted
    there continues."""
    base: str | None = None
    """Run directory, also in a bucket, whose newest checkpoint a new run's weights start from.
    Memories that the base has not are new and add nothing before the first step. With
    optimizer.train, checkpoints hold what trains, and refer to the base's for the rest. None:
    weights are drawn."""
    plugins: tuple[str, ...] = ()
    """Modules outside this package that define or register what the run uses: rules, mixers, data.
    Those of classes and registered names in the configuration are added by themselves. Whoever
    opens the run names them again with --plugins: a run's file alone imports no module."""

    def __post_init__(self) -> None:
        """Checks the types and limits that are the same everywhere; sections check their own."""
        check_fields(self)
        for name, hint in config_json.hints(Experiment).items():
            config_json.from_json(to_json(getattr(self, name)), hint, path=name)
        if scheme_of(self.run_dir) is not None:
            check_store(self.run_dir, "run_dir")
        if scheme_of(self.base or "") is not None:
            check_store(self.base or "", "base")
        missing = missing_plugins(self, self.plugins)
        object.__setattr__(self, "plugins", (*self.plugins, *missing))

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
            section.pop(name, None)  # Not every kind of data has all of these fields.
        canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()


def from_json(values: Any, annotation: Any = Experiment, *, path: str = "config") -> Any:
    """`config_json.from_json` of what a run stored, by default an `Experiment`, whole.

    Raises:
      UnknownNameError: as `config_json.from_json`, and where a field has no value, as another
        version had not got it.
      ValueError: also where plugins are named that this program did not import.
    """
    if annotation is Experiment and isinstance(values, dict):
        names = values.get("plugins", [])
        names = config_json.from_json(names, tuple[str, ...], path=f"{path}.plugins")
        refuse_unnamed(names, path)
    return config_json.from_json(values, annotation, path=path, whole=True)


CONFIGS = Path(__file__).parent / "configs"
"""The folder of the configs that come with the package, one run each."""
PAPER = Path(__file__).parent / "paper" / "configs.py"
"""The file of the paper's runs."""


def shipped_configs() -> dict[str, Path]:
    """The configs that come with the package by name (`recall`, `gdn_swa`), and their files."""
    found = {path.stem: path for path in CONFIGS.glob("*.py") if path.stem != "__init__"}
    found |= dict.fromkeys(runpy.run_path(str(PAPER))["CONFIGS"], PAPER)
    return dict(sorted(found.items()))


def load_config(config: str | Path) -> Experiment:
    """The experiment of a shipped config or of a config file.

    Args:
      config: a name in `shipped_configs()`; or the path of a Python file that ends in `.py` and
        defines `get_config() -> Experiment`; or `PATH.py:NAME`, where the file defines a table of
        such functions by name, `CONFIGS`. The file may import its neighbours.

    Raises:
      FileNotFoundError: no such name or file; the nearest name is given.
      ValueError: the file defines no such function, or it returns something else.

    Example:
      >>> from fwpkm_jax import load_config
      >>> load_config("recall").run_dir
      'runs/recall'
    """
    path, name = _config_file(config)
    with _importing_neighbours(path):
        defined = runpy.run_path(str(path))
        several = defined.get("CONFIGS", {})
        get_config = several.get(name) if name else defined.get("get_config")
        if get_config is None:
            missing = f"run {name!r}{nearest(name, several)}" if name else "get_config()"
            one = f" {path}:NAME names one of {some(tuple(several))}." if several else ""
            raise ValueError(f"{path} defines no {missing}; a config file must.{one}")
        experiment = get_config()
    if not isinstance(experiment, Experiment):
        raise ValueError(
            f"get_config() of {path} returned a {type(experiment).__name__}; "
            "it must return an Experiment."
        )
    return experiment


@contextlib.contextmanager
def _importing_neighbours(path: Path) -> Iterator[None]:
    """While a config file runs, it may import the files beside it, as a program may."""
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _config_file(config: str | Path) -> tuple[Path, str]:
    """The file of a shipped config or of a path, and the name in the file's table, "" for none."""
    file, colon, name = str(config).partition(".py:")
    path = Path(file + ".py" if colon else config)
    if path.suffix == ".py":
        if path.is_file():
            return path, name
    elif (CONFIGS / f"{config}.py").is_file():
        return CONFIGS / f"{config}.py", ""
    shipped = shipped_configs()
    if path.suffix == ".py":
        name = path.with_suffix("").as_posix().removeprefix("configs/")
        hint = nearest(path.name, (beside.name for beside in path.parent.glob("*.py")))
        hint = f"; the shipped config of that name is {name}" if name in shipped else hint
        raise FileNotFoundError(f"There is no config file {path}{hint}.")
    if str(config) not in shipped:
        hint = nearest(str(config), shipped)
        if "=" in str(config):
            hint = "; an option starts with two hyphens: --section.field VALUE"
        raise FileNotFoundError(
            f"There is no shipped config {str(config)!r}{hint}. fwpkm configs lists them; the path "
            "of a file ends in .py."
        )
    return shipped[str(config)], str(config)


def read_experiment(run_dir: str | Path) -> Experiment:
    """The experiment a run directory was trained with, from its `config.json`.

    Raises:
      FileNotFoundError: there is no run.
      ValueError: the run names plugins that this program did not import, or the configuration
        cannot be read; the message names the value, or the commit that wrote it.
    """
    path, values = stored_config(run_dir)
    try:
        return from_json(values, path=str(path))
    except OutsideFileError:
        raise
    except ValueError as error:
        problem = f"cannot be used ({str(error).removeprefix(str(path)).lstrip(':. ').rstrip('.')})"
        if not isinstance(error, config_json.UnknownNameError):
            raise OutsideFileError(path, problem, otherwise=_COPY) from error
        raise OutsideFileError(
            path,
            f"{problem}: another version of fwpkm_jax wrote this run ({_commit_of(run_dir)})",
            otherwise="read it with that version",
        ) from error


_COPY = "put back a copy: each checkpoint has one, checkpoints/STEP/config/metadata"


def stored_config(run_dir: str | Path) -> tuple[str, dict[str, Any]]:
    """Where the configuration of a run is, on this machine or in a bucket, and its JSON.

    Raises:
      FileNotFoundError: there is no run.
      ValueError: it cannot be read.
    """
    name = f"{address_of(run_dir).rstrip('/')}/config.json"
    try:
        content = read_small(name, most=MOST_JSON_BYTES)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{name} does not exist; {address_of(run_dir)} holds no run."
        ) from error
    return name, parse_json(content, name, otherwise=_COPY, kind=dict)


def _commit_of(run_dir: str | Path) -> str:
    """The code of a run's first session, as `environment.json` tells."""
    try:
        commit = read_json(Path(run_dir) / "environment.json")["sessions"][0]["commit"]
    except (OSError, ValueError, LookupError, TypeError):
        commit = None
    return f"commit {shown(commit, 50)}" if commit else "its commit was not recorded"
