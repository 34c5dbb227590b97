"""`python -m fwpkm_jax.interchange export | import_weights | import_release`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fwpkm_jax.command_line import report
from fwpkm_jax.config import load_config
from fwpkm_jax.interchange.imported_run import start_run
from fwpkm_jax.interchange.release import read_release
from fwpkm_jax.interchange.weights_folder import export_run, read_folder
from fwpkm_jax.training.checkpoints.restore import DamagedCheckpointError

_PROGRAM = "fwpkm_jax.interchange"


@dataclass(frozen=True, kw_only=True)
class Export:
    """Writes a run's slow and fast weights into a folder: weights.safetensors and config.json."""

    run: tyro.conf.Positional[Path]
    """Run directory."""
    folder: tyro.conf.Positional[Path]
    """New folder."""
    step: int | Literal["best"] | None = None
    """Checkpoint: a step, the best by validation loss, or None for the newest."""

    def do(self) -> Path:
        return export_run(self.run, self.folder, step=self.step)


@dataclass(frozen=True, kw_only=True)
class ImportWeights:
    """Starts a run from an exported folder."""

    folder: tyro.conf.Positional[Path]
    """What `export` wrote."""
    run: tyro.conf.Positional[Path]
    """New run directory."""

    def do(self) -> Path:
        experiment, weights = read_folder(self.folder)
        return start_run(replace(experiment, run_dir=str(self.run)), weights)


@dataclass(frozen=True, kw_only=True)
class ImportRelease:
    """Starts a run from a checkpoint of the authors' release."""

    checkpoint: tyro.conf.Positional[Path]
    """A .safetensors file, or what torch.save wrote (pytorch_model.bin)."""
    run: tyro.conf.Positional[Path]
    """New run directory."""
    config: Path
    """Config file of the model that was trained, for instance configs/gdn_swa__fwpkm2_6_10.py."""

    def do(self) -> Path:
        experiment = replace(load_config(self.config), run_dir=str(self.run))
        return start_run(experiment, read_release(self.checkpoint, experiment.model))


Command = (
    Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[ImportWeights, tyro.conf.subcommand("import_weights")]
    | Annotated[ImportRelease, tyro.conf.subcommand("import_release")]
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command; its exit code."""
    command: Export | ImportWeights | ImportRelease = tyro.cli(
        Command,  # pyright: ignore[reportArgumentType]
        args=list(arguments),
        prog=_PROGRAM,
        use_underscores=True,
    )
    try:
        print(f"wrote {command.do()}")
    except (ValueError, OSError) as error:
        return report(_PROGRAM, error)
    except DamagedCheckpointError as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
