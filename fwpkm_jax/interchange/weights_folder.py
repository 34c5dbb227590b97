"""Exports a run's weights to a folder with `weights.safetensors` and `config.json`."""

from pathlib import Path
from typing import Literal

import jax
import numpy as np

from fwpkm_jax.config import Experiment, read_experiment
from fwpkm_jax.interchange.weights import Weights, abstract_weights, checked, refuse_other_names
from fwpkm_jax.io.atomic import check_new, new_folder, replacing, write_json
from fwpkm_jax.io.safetensors import SafetensorsFile, write_tensors
from fwpkm_jax.io.status_line import watched
from fwpkm_jax.io.untrusted import OutsideFileError, shown
from fwpkm_jax.run.load import Run, WhichWeights, load_run
from fwpkm_jax.training.state import model_graph

_FILE = "weights.safetensors"
_FORMAT = "fwpkm_jax 1"


def export_run(
    run_dir: str | Path,
    folder: str | Path,
    *,
    step: int | Literal["best"] | None = None,
    weights: WhichWeights = "trained",
    memories: Literal["all", "first"] = "all",
) -> Path:
    """Writes a checkpoint's slow and fast weights in float32, named as in `Weights.named`.

    Args:
      folder: a new folder; an interrupted export leaves none.
      step: as in `load_run`.
      weights: as in `load_run`.
      memories: all of a run's memories, or the first one alone.

    Raises:
      FileExistsError: the folder exists.
    """
    folder = Path(folder)
    check_new(folder)
    run = load_run(run_dir, step, weights=weights)
    count = slice(None if memories == "all" else 1)
    memory = jax.tree.map(lambda x: x[count], run.memory)
    named = Weights(run.params, memory).named()
    arrays = {name: np.asarray(x) for name, x in jax.device_get(named).items()}
    with new_folder(folder) as partial:
        with replacing(partial / _FILE) as file:
            write_tensors(file, arrays, metadata={"format": _FORMAT, "step": str(run.step)})
        write_json(partial / "config.json", run.experiment.to_json())
    return folder


def open_run(path: Path, step: int | Literal["best"] | None = None) -> Run:
    """A run, or a folder that `export_run` wrote as one of step 0."""
    if (path / "checkpoints").is_dir() or not (path / _FILE).is_file():
        return load_run(path, step)
    if step is not None:
        raise ValueError(f"step={step!r}: {path} holds exported weights, which are of one step.")
    experiment, weights = read_folder(path)
    return Run(experiment, model_graph(experiment.model), weights.params, weights.memory, step=0)


def read_folder(folder: str | Path) -> tuple[Experiment, Weights]:
    """The configuration and the weights that `export_run` wrote.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the weights cannot be read or do not fit the configuration.
    """
    folder = Path(folder)
    path = folder / _FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; {folder} holds no exported weights.")
    experiment = read_experiment(folder)
    file = SafetensorsFile(path, otherwise="export the run again")
    found = file.metadata.get("format")
    if found != _FORMAT:
        raise OutsideFileError(
            path,
            f"has the format {shown(found, 60)!r}, not {_FORMAT!r}",
            otherwise="checkpoints of the authors' release are read by `fwpkm import release`",
        )
    groups = [x.shape[0] for name, x in file.items() if name.startswith("memory/") and x.shape]
    if groups and not 1 <= groups[0] < 2**31:
        raise OutsideFileError(path, f"holds {groups[0]} memories per layer")
    like = abstract_weights(experiment.model, groups=groups[0] if groups else 1)
    expected = like.named()
    refuse_other_names(file, expected, path)
    arrays = {
        name: checked(name, file.read(name), leaf.shape, path)
        for name, leaf in watched(expected.items(), "arrays read")
    }
    return experiment, like.replaced(arrays)
