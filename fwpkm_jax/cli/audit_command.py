"""`fwpkm audit RUN`: checks what a model's recall rests on; a page and a bundle in RUN/audit.

RUN may also be a folder that `fwpkm export` wrote, or a bundle, whose headline is computed again.
`fwpkm audit --torch FOLDER` checks a model in PyTorch.
Exit codes: 0 no check failed; 1 a check failed; 2 wrong command line, or there is no such run.
"""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fwpkm_jax.audit.audit import Audit, AuditConfig, audit_run, provenance_of, started_by
from fwpkm_jax.audit.bundle import is_bundle, recomputed, write_bundle
from fwpkm_jax.audit.in_pytorch import audit_torch, load_torch
from fwpkm_jax.audit.lines import Line, failures
from fwpkm_jax.audit.origin import figures, headline
from fwpkm_jax.audit.page import as_text, summary
from fwpkm_jax.cli.options import PluginOptions, parse_options
from fwpkm_jax.interchange.weights_folder import open_run
from fwpkm_jax.io.atomic import own_folder
from fwpkm_jax.io.terminal import say_what_lasts, visible
from fwpkm_jax.storage.compile_cache import use_compile_cache


@dataclass(frozen=True, kw_only=True)
class AuditOptions(PluginOptions, AuditConfig):
    """Checks what a model's recall rests on, and writes a page and a bundle."""

    run: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="RUN")] = None
    """Run directory, a folder of exported weights, or a bundle, whose headline is computed again
    from its answers."""
    torch: Path | None = None
    """A folder in place of RUN, which transformers loads: `fwpkm export hf` wrote it, or it is any
    causal language model's. Its programs are run (trust_remote_code): read them first."""
    step: int | Literal["best"] | None = None
    """Checkpoint: a step, the best by validation loss, or None for the newest."""
    seeds: tuple[Path, ...] = ()
    """Runs of other trainings of the same configuration, for the interval of the headline."""
    out: Path | None = None
    """Folder of the bundle. None: RUN/audit or FOLDER/audit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.run is None) == (self.torch is None):
            raise ValueError("name one RUN, or --torch FOLDER.")
        if self.torch is not None and (self.seeds or self.step is not None):
            raise ValueError(f"torch={self.torch} has one step; leave out --step and --seeds.")


def main(arguments: Sequence[str], program: str = "fwpkm audit") -> int:
    """Carries out a command line; returns the program's exit code."""
    logging.getLogger("fwpkm_jax").setLevel(logging.INFO)
    options = parse_options(AuditOptions, arguments, program)
    if options.torch is not None:
        return _audit_torch(options, options.torch)
    assert options.run is not None  # As `AuditOptions` checks.
    if is_bundle(options.run):
        return _recompute(options.run)
    use_compile_cache()
    return _audit(options, options.run)


def _recompute(folder: Path) -> int:
    found = recomputed(folder)
    for line in found.lines:
        print(visible(as_text(line)))
    _print_measured(found.headline, found.figures)
    print(f"All files of {folder} are those of its manifest.")
    return 0


def _audit(options: AuditOptions, path: Path) -> int:
    run = open_run(path, options.step)
    others = {str(other): open_run(other) for other in options.seeds}
    for name, other in others.items():
        if other.experiment.model != run.experiment.model:
            raise ValueError(
                f"seeds={name}: its model is another one than that of {path}; name "
                "trainings of one configuration."
            )
    name, out = str(path), _out(options, path)
    say_what_lasts("Compiling; a line is printed when its check is done ...")
    found = audit_run(run, options, name=name, others=others, show=_show)
    return _written(found, out, path, provenance_of(run, name=name, command=sys.argv))


def _audit_torch(options: AuditOptions, folder: Path) -> int:
    out = _out(options, folder)
    say_what_lasts("Reading; a line is printed when its check is done ...")
    loaded = load_torch(folder)
    found = audit_torch(loaded.model, options, name=str(folder), data=loaded.data, show=_show)
    provenance = loaded.provenance | started_by(sys.argv)
    return _written(found, out, folder, provenance)


def _out(options: AuditOptions, audited: Path) -> Path:
    """Where the bundle goes; what lies there is looked at before minutes are spent."""
    out = audited / "audit" if options.out is None else options.out
    return own_folder(out) if os.path.lexists(out) else out


def _show(line: Line) -> None:
    print(visible(as_text(line)), flush=True)


def _written(found: Audit, out: Path, audited: Path, provenance: Mapping[str, Any]) -> int:
    """Writes the bundle and prints what it says; the exit code."""
    path = write_bundle(
        out,
        found.lines,
        found.answers,
        title=f"Audit of {audited.resolve().name}",
        provenance=provenance,
    )
    _print_measured(headline(found.answers), figures(found.answers))
    print(f"{visible(summary(found.lines))}\nwrote {path}")
    return 1 if failures(found.lines) else 0


def _print_measured(told: str, measured: Mapping[str, str]) -> None:
    print(f"\n{visible(told)}")
    for name, text in measured.items():
        print(visible(f"  {name}: {text}"))
