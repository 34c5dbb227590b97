"""`fwpkm import weights FOLDER RUN` and `fwpkm import release CHECKPOINT RUN --config CONFIG`.

Each starts a run from weights made elsewhere; `fwpkm train --resume RUN` trains it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from fwpkm_jax.command_line import report
from fwpkm_jax.config import load_config
from fwpkm_jax.interchange import read_folder, read_release, start_run


@dataclass(frozen=True, kw_only=True)
class ImportWeights:
    """Starts a run from a folder that `fwpkm export` wrote."""

    folder: tyro.conf.Positional[Path]
    """The exported folder."""
    run: tyro.conf.Positional[Path]
    """New run directory."""

    def start(self) -> Path:
        experiment, weights = read_folder(self.folder)
        return start_run(replace(experiment, run_dir=str(self.run)), weights)


@dataclass(frozen=True, kw_only=True)
class ImportRelease:
    """Starts a run from a checkpoint of the authors' release."""

    checkpoint: tyro.conf.Positional[Path]
    """A .safetensors file, or what torch.save wrote (pytorch_model.bin)."""
    run: tyro.conf.Positional[Path]
    """New run directory."""
    config: str
    """Config of the model that was trained, a shipped name such as gdn_swa__fwpkm2_6_10 or a
    file."""

    def start(self) -> Path:
        experiment = replace(load_config(self.config), run_dir=str(self.run))
        return start_run(experiment, read_release(self.checkpoint, experiment.model))


Source = (
    Annotated[ImportWeights, tyro.conf.subcommand("weights")]
    | Annotated[ImportRelease, tyro.conf.subcommand("release")]
)


def main(arguments: Sequence[str], program: str = "fwpkm import") -> int:
    """Imports; the program's exit code."""
    source: ImportWeights | ImportRelease = tyro.cli(
        Source,  # pyright: ignore[reportArgumentType]
        args=list(arguments),
        prog=program,
        use_underscores=True,
    )
    try:
        print(f"wrote {source.start()}")
    except (ValueError, OSError) as error:
        return report(program, error)
    return 0
