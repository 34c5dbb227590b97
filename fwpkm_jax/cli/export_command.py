"""`fwpkm export RUN FOLDER`: a run's weights as safetensors, to give away."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from fwpkm_jax.command_line import report
from fwpkm_jax.interchange import export_run
from fwpkm_jax.training.checkpoints.restore import DamagedCheckpointError


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Writes a run's slow and fast weights into a folder: weights.safetensors and config.json."""

    run: tyro.conf.Positional[Path]
    """Run directory."""
    folder: tyro.conf.Positional[Path]
    """New folder."""
    step: int | Literal["best"] | None = None
    """Checkpoint: a step, the best by validation loss, or None for the newest."""


def main(arguments: Sequence[str], program: str = "fwpkm export") -> int:
    """Exports; the program's exit code."""
    options = tyro.cli(ExportOptions, args=list(arguments), prog=program, use_underscores=True)
    try:
        print(f"wrote {export_run(options.run, options.folder, step=options.step)}")
    except (ValueError, OSError) as error:
        return report(program, error)
    except DamagedCheckpointError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    return 0
