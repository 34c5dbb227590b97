"""`fwpkm export RUN FOLDER`: writes a run's weights as safetensors, for use elsewhere.

`fwpkm export hf RUN FOLDER` writes a folder that the transformers library loads, and `--push
owner/name` puts it on the Hugging Face Hub.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fwpkm_jax.cli.options import CheckpointOptions, FolderArgument, RunArgument, parse_options
from fwpkm_jax.interchange import export_run
from fwpkm_jax.interchange.hf import export_model, push_model
from fwpkm_jax.io.atomic import check_local
from fwpkm_jax.io.status_line import progress_shown
from fwpkm_jax.storage.addresses import address_of
from fwpkm_jax.storage.sync import made_in
from fwpkm_jax.training.runs.mirror import run_folder


@dataclass(frozen=True, kw_only=True)
class ExportOptions(CheckpointOptions):
    """Writes a run's slow and fast weights into a folder: weights.safetensors and config.json.

    `fwpkm export hf RUN FOLDER` writes a folder of the transformers library instead."""

    run: RunArgument
    """Run directory."""
    folder: FolderArgument
    """Folder to create. It may lie in a bucket."""
    memories: Literal["all", "first"] = "all"
    """all: every memory of the run. first: one, from which all groups of an import start."""

    def export(self) -> str:
        with run_folder(self.run) as run, made_in(self.folder) as folder:
            export_run(run, folder, step=self.step, weights=self.weights, memories=self.memories)
        return address_of(self.folder)


@dataclass(frozen=True, kw_only=True)
class ExportHF(CheckpointOptions):
    """Writes a run as a folder of the transformers library, if one of its families computes what
    the run's model does; pushes it to the Hugging Face Hub, if asked."""

    run: RunArgument
    """Run directory."""
    folder: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="FOLDER")] = None
    """Folder to create. It may lie in a bucket, and may be left out with --push."""
    push: str | None = None
    """owner/name on the hub, which gets the folder as one commit, with a card written from the
    run's results. The repository is made if it is not there."""
    private: bool = False
    """Whether a repository that is made can be seen by its owner alone."""
    license: str | None = None
    """The model's licence for its card, as the hub names it, such as apache-2.0; None: the card has
    none."""

    def export(self) -> str:
        if self.push is None and self.folder is None:
            raise ValueError("FOLDER is missing: Folder to create; or --push owner/name.")
        if self.push is not None and self.folder is not None:
            check_local(self.folder, "folder")
        with run_folder(self.run) as run:
            if self.push is None:
                assert self.folder is not None
                with made_in(self.folder) as folder:
                    export_model(
                        run,
                        folder,
                        step=self.step,
                        weights=self.weights,
                        license_name=self.license,
                    )
                return address_of(self.folder)
            return push_model(
                run,
                self.push,
                folder=self.folder,
                step=self.step,
                weights=self.weights,
                private=self.private,
                license_name=self.license,
            )


def main(arguments: Sequence[str], program: str = "fwpkm export") -> int:
    """Exports a run; returns the program's exit code."""
    cls = ExportOptions
    if arguments[:1] == ["hf"]:
        cls, arguments, program = ExportHF, arguments[1:], f"{program} hf"
    options = parse_options(cls, arguments, program, addresses=("run", "folder"))
    with progress_shown(f"Exporting {options.run} ..."):
        written = options.export()
    print(f"wrote {written}")
    return 0
