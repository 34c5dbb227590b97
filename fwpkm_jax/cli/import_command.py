"""`fwpkm import weights FOLDER RUN`, `release CHECKPOINT RUN --config CONFIG`, `hf FOLDER RUN`.

Each starts a run from existing weights; `fwpkm train --resume RUN` continues its training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from fwpkm_jax.cli.options import PluginOptions, checked
from fwpkm_jax.command_line import report
from fwpkm_jax.config import load_config
from fwpkm_jax.interchange import read_folder, read_release, start_run
from fwpkm_jax.interchange.hf import import_model
from fwpkm_jax.interchange.hf.model_folder import ParameterDtype
from fwpkm_jax.layers.partition import MeshConfig


@dataclass(frozen=True, kw_only=True)
class ImportWeights(PluginOptions):
    """Starts a run from a folder that `fwpkm export` wrote."""

    folder: tyro.conf.Positional[Path]
    """The exported folder."""
    run: tyro.conf.Positional[Path]
    """New run directory."""

    def start(self) -> Path:
        experiment, weights = read_folder(self.folder)
        return start_run(replace(experiment, run_dir=str(self.run)), weights)


@dataclass(frozen=True, kw_only=True)
class ImportRelease(PluginOptions):
    """Starts a run from a checkpoint of the authors' release."""

    checkpoint: tyro.conf.Positional[Path]
    """A .safetensors file, or a file that torch.save wrote (pytorch_model.bin)."""
    run: tyro.conf.Positional[Path]
    """New run directory."""
    config: str
    """Config of the trained model: a shipped config's name, such as gdn_swa__fwpkm2_6_10, or a
    file."""

    def start(self) -> Path:
        experiment = replace(load_config(self.config), run_dir=str(self.run))
        return start_run(experiment, read_release(self.checkpoint, experiment.model))


@dataclass(frozen=True, kw_only=True)
class ImportHF:
    """Starts a run from a folder of the transformers library: Qwen3, Llama 3, Qwen3.5 (its text
    part), Qwen3-Next, OLMo-Hybrid."""

    folder: tyro.conf.Positional[Path]
    """The folder, with config.json and safetensors files."""
    run: tyro.conf.Positional[Path]
    """New run directory."""
    dtype: ParameterDtype | None = None
    """Dtype of the matrices. None: bfloat16 if all are stored in bfloat16, otherwise float32."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """The devices that the weights are read onto; each device reads its part only."""

    def start(self) -> Path:
        return import_model(self.folder, self.run, dtype=self.dtype, mesh=self.mesh)


Source = (
    Annotated[ImportWeights, tyro.conf.subcommand("weights")]
    | Annotated[ImportRelease, tyro.conf.subcommand("release")]
    | Annotated[ImportHF, tyro.conf.subcommand("hf")]
)


def main(arguments: Sequence[str], program: str = "fwpkm import") -> int:
    """Imports weights as a new run; returns the program's exit code."""
    source: ImportWeights | ImportRelease | ImportHF = tyro.cli(
        Source,  # pyright: ignore[reportArgumentType]
        args=list(arguments),
        prog=program,
        use_underscores=True,
    )
    try:
        print(f"wrote {checked(source).start()}")
    except (ValueError, OSError) as error:
        return report(program, error)
    return 0
