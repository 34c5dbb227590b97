"""`fwpkm export RUN FOLDER`: writes a run's weights as safetensors, for use elsewhere.

`fwpkm export hf RUN FOLDER` writes a folder that the transformers library loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fwpkm_jax.cli.options import FolderArgument, PluginOptions, RunArgument, parse_options
from fwpkm_jax.command_line import report, say_error
from fwpkm_jax.interchange import export_run
from fwpkm_jax.interchange.hf import export_model
from fwpkm_jax.training.checkpoints.restore import DamagedCheckpointError


@dataclass(frozen=True, kw_only=True)
class ExportOptions(PluginOptions):
    """Writes a run's slow and fast weights into a folder: weights.safetensors and config.json.

    `fwpkm export hf RUN FOLDER` writes a folder of the transformers library instead."""

    run: RunArgument
    """Run directory."""
    folder: FolderArgument
    """Folder to create."""
    step: int | Literal["best"] | None = None
    """Checkpoint: a step, the best by validation loss, or None for the newest."""


@dataclass(frozen=True, kw_only=True)
class ExportHF(ExportOptions):
    """Writes a run as a folder of the transformers library, if one of its families computes what
    the run's model does."""


def main(arguments: Sequence[str], program: str = "fwpkm export") -> int:
    """Exports a run; returns the program's exit code."""
    arguments, kind, export = list(arguments), ExportOptions, export_run
    if arguments[:1] == ["hf"]:
        arguments, kind, export = arguments[1:], ExportHF, export_model
        program = f"{program} hf"
    try:
        options = parse_options(arguments, program, kind(run=Path(), folder=Path()))
        print(f"wrote {export(options.run, options.folder, step=options.step)}")
    except (ValueError, OSError) as error:
        return report(program, error)
    except DamagedCheckpointError as error:
        say_error(program, error)
        return 2
    return 0
