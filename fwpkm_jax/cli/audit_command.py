"""`fwpkm audit RUN`: checks what a model's recall rests on; a page and a bundle in RUN/audit.

RUN may also be a folder that `fwpkm export` wrote, or a bundle, whose headline is computed again.
Exit codes: 0 no check failed; 1 a check failed; 2 wrong command line, or there is no such run.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fwpkm_jax.audit.audit import AuditConfig, audit_run, provenance_of
from fwpkm_jax.audit.bundle import is_bundle, recomputed, write_bundle
from fwpkm_jax.audit.lines import failures
from fwpkm_jax.audit.origin import figures, headline
from fwpkm_jax.audit.page import as_text, summary
from fwpkm_jax.cli.options import PluginOptions, RunArgument, parse_options
from fwpkm_jax.interchange import read_folder
from fwpkm_jax.io.terminal import visible
from fwpkm_jax.run.load import Run, load_run
from fwpkm_jax.storage.compile_cache import use_compile_cache
from fwpkm_jax.training.state import model_graph


@dataclass(frozen=True, kw_only=True)
class AuditOptions(PluginOptions, AuditConfig):
    """Checks what a model's recall rests on, and writes a page and a bundle."""

    run: RunArgument
    """Run directory, a folder of exported weights, or a bundle, whose headline is computed again
    from its answers."""
    step: int | Literal["best"] | None = None
    """Checkpoint: a step, the best by validation loss, or None for the newest."""
    seeds: tuple[Path, ...] = ()
    """Runs of other trainings of the same configuration, for the interval of the headline."""
    out: Path | None = None
    """Folder of the bundle. None: RUN/audit."""


def main(arguments: Sequence[str], program: str = "fwpkm audit") -> int:
    """Carries out a command line; returns the program's exit code."""
    logging.getLogger("fwpkm_jax").setLevel(logging.INFO)
    options = parse_options(AuditOptions, arguments, program)
    if is_bundle(options.run):
        return _recompute(options.run)
    use_compile_cache()
    return _audit(options)


def _recompute(folder: Path) -> int:
    found = recomputed(folder)
    for line in found.lines:
        print(visible(as_text(line)))
    _print_measured(found.headline, found.figures)
    print(f"All files of {folder} are those of its manifest.")
    return 0


def _audit(options: AuditOptions) -> int:
    run = open_run(options.run, options.step)
    others = {str(path): open_run(path) for path in options.seeds}
    for name, other in others.items():
        if other.experiment.model != run.experiment.model:
            raise ValueError(
                f"seeds={name}: its model is another one than that of {options.run}; name "
                "trainings of one configuration."
            )
    name = str(options.run)
    found = audit_run(
        run,
        options,
        name=name,
        others=others,
        show=lambda line: print(visible(as_text(line)), flush=True),
    )
    path = write_bundle(
        options.run / "audit" if options.out is None else options.out,
        found.lines,
        found.answers,
        title=f"Audit of {options.run.resolve().name}",
        provenance=provenance_of(run, name=name, command=sys.argv),
    )
    _print_measured(headline(found.answers), figures(found.answers))
    print(f"{visible(summary(found.lines))}\nwrote {path}")
    return 1 if failures(found.lines) else 0


def _print_measured(told: str, measured: Mapping[str, str]) -> None:
    print(f"\n{visible(told)}")
    for name, text in measured.items():
        print(visible(f"  {name}: {text}"))


def open_run(path: Path, step: int | Literal["best"] | None = None) -> Run:
    """A run, or a folder of exported weights as one of step 0."""
    if (path / "checkpoints").is_dir() or not (path / "weights.safetensors").is_file():
        return load_run(path, step)
    if step is not None:
        raise ValueError(f"step={step!r}: {path} holds exported weights, which are of one step.")
    experiment, weights = read_folder(path)
    return Run(experiment, model_graph(experiment.model), weights.params, weights.memory, step=0)
