"""Compares the streaming losses of two runs on the same tokens.

    python -m benchmarks.paper.loss_difference RUN_A RUN_B

reads what `fwpkm eval RUN --suite ppl` saved for each run. It writes the difference A minus B,
which is negative where A predicts better, as a table, a picture and JSON.

References: Zhao and Jones 2026, arXiv:2601.00671, Figure 15.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro

from fwpkm_jax.evaluation.display.plot_style import (
    BLUE,
    GREY,
    count_in_thousands,
    finish,
    new_figure,
    save_figure,
)
from fwpkm_jax.evaluation.display.tables import format_table, signed
from fwpkm_jax.evaluation.readers.token_losses import TokenLosses, differences
from fwpkm_jax.io.atomic import write_json
from fwpkm_jax.io.options import read_options
from fwpkm_jax.io.terminal import say_error, visible
from fwpkm_jax.io.untrusted import read_json
from fwpkm_jax.literals import check_fields


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compares the streaming losses of two runs."""

    first: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FIRST")]
    """Run directory, or a `ppl.npz` with its `ppl.json` beside it."""
    second: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SECOND")]
    """The run to subtract, given in the same way."""
    memory: Literal["writing", "frozen"] = "writing"
    """Which pass of each run to compare."""
    documents: int = 10
    """Number of documents whose curves are drawn, from the first on."""
    tokens: int = 128
    """Tokens between two points of a curve."""
    out: Path | None = None
    """Directory for the files; None: that of the first run's results."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("documents", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")


class Streamed(NamedTuple):
    """A run's saved losses."""

    name: str
    losses: TokenLosses
    record: dict[str, Any]


def read_losses(path: Path, *, memory: Literal["writing", "frozen"]) -> Streamed:
    """The losses that `fwpkm eval --suite ppl` saved for a run.

    Raises:
      FileNotFoundError: the run has no saved losses.
      ValueError: the pass was not run, or the file is damaged.
    """
    arrays = path if path.suffix == ".npz" else path / "results" / "ppl.npz"
    if not arrays.is_file():
        raise FileNotFoundError(f"There is no {arrays}; run fwpkm eval {path} --suite ppl first.")
    record = read_json(arrays.with_suffix(".json"), otherwise="evaluate again")
    try:
        with np.load(arrays) as saved:
            if (wanted := f"loss_{memory}") not in saved:
                raise ValueError(f"it has no pass with the memory {memory}; evaluate with both")
            places = {name: saved[name] for name in ("source", "document", "segment", "position")}
            losses = TokenLosses(**places, loss=saved[wanted], document_ids=[])
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{arrays} cannot be read: {error}.") from error
    return Streamed(arrays.parent.parent.name, losses, record)


def loss_difference(
    first: Streamed, second: Streamed, *, documents: int, tokens: int
) -> dict[str, Any]:
    """Loss of `first` minus loss of `second`, token by token.

    Args:
      first: losses of the first run.
      second: losses of the run to subtract.
      documents: number of documents with a curve, from the first on.
      tokens: tokens between two points of a curve.

    Returns:
      `difference`, per data set and over all of them, with 95 % intervals over segments; and
      `curves`, for each document the mean difference from its start to each of `ends`.

    Raises:
      ValueError: the two were not scored on the same tokens in the same segments.
    """
    for part in ("data_files", "tokenizer", "mode"):
        ours, theirs = (one.record["provenance"][part] for one in (first, second))
        if part == "data_files":  # The files may have been moved between the two evaluations.
            ours, theirs = (list(hashes.values()) for hashes in (ours, theirs))
        if ours != theirs:
            raise ValueError(
                f"{first.name} and {second.name} were read differently: {part} {ours} and {theirs}."
            )
    for field in ("source", "document", "segment", "position"):
        if not np.array_equal(getattr(first.losses, field), getattr(second.losses, field)):
            raise ValueError(
                f"{first.name} and {second.name} scored {len(first.losses.loss)} and "
                f"{len(second.losses.loss)} tokens, not the same; evaluate both with equal limits."
            )
    difference = first.losses.loss.astype(np.float64) - second.losses.loss
    curves = []
    for number in range(documents):
        one = difference[first.losses.document == number]
        if len(one):
            ends = np.unique([*range(tokens, len(one) + 1, tokens), len(one)])
            means = np.cumsum(one)[ends - 1] / ends
            curves.append(
                {"document": number, "step": tokens, "ends": ends.tolist(), "mean": means.tolist()}
            )
    return {
        "first": first.record["provenance"]["checkpoint"] | {"name": first.name},
        "second": second.record["provenance"]["checkpoint"] | {"name": second.name},
        "scored_tokens": len(difference),
        "difference": differences(first.losses, second.losses, _sources(first)),
        "curves": curves,
    }


def difference_table(found: dict[str, Any]) -> str:
    """The mean difference by data set."""
    by_source = found["difference"]["by_source"]
    rows = [[name, signed(one)] for name, one in by_source.items()]
    if len(rows) > 1:
        rows.append(["all", signed(found["difference"]["all"])])
    header = ["data", "loss difference (95 %)"]
    title = f"{found['first']['name']} minus {found['second']['name']}, below 0: the first predicts"
    return f"{title} better\n{format_table(header, rows)}"


def plot_difference(found: dict[str, Any], path: Path) -> Path:
    """The mean difference since each document's start."""
    figure, axes = new_figure(7.6, 4.2)
    axes.axhline(0, color=GREY, lw=1)
    curves = found["curves"]
    for curve in curves:
        axes.plot(curve["ends"], curve["mean"], color=BLUE, alpha=0.35, lw=1)
    at: dict[int, list[float]] = {}
    for curve in curves:
        for end, mean in zip(curve["ends"], curve["mean"], strict=True):
            if end % curve["step"] == 0:  # Not the ends of documents.
                at.setdefault(end, []).append(mean)
    # With few documents the mean would jump where one of them ends.
    half = {end: means for end, means in sorted(at.items()) if 2 * len(means) >= len(curves)}
    axes.plot(list(half), [np.mean(means) for means in half.values()], color=BLUE, lw=2.2)
    count_in_thousands(axes.xaxis)
    title = f"Loss of {found['first']['name']} minus {found['second']['name']}"
    below = "thick: their mean while at least half continue; below 0 the first predicts better"
    finish(
        axes,
        title,
        f"thin: {len(curves)} documents; {below}",
        xlabel="position in the document (tokens)",
        ylabel="difference so far (nats per token)",
    )
    return save_figure(figure, path)


def _sources(one: Streamed) -> list[str]:
    """Names of the data sets by number; data sets without a scored token are left out."""
    results = one.record["results"]
    scored = next(results[name] for name in ("writing", "frozen") if name in results)["by_source"]
    names = [""] * (int(one.losses.source.max()) + 1)
    for number, name in zip(np.unique(one.losses.source), scored, strict=True):
        names[number] = name
    return names


def main(arguments: Sequence[str]) -> int:
    """Compares the two runs that the command line names, and returns the exit code."""
    try:
        program = "benchmarks.paper.loss_difference"
        options = read_options(Options, arguments, program=program)
        first, second = (
            read_losses(path, memory=options.memory) for path in (options.first, options.second)
        )
        found = loss_difference(first, second, documents=options.documents, tokens=options.tokens)
    except (ValueError, FileNotFoundError) as error:
        say_error("loss_difference", error)
        return 2
    first_is_file = options.first.suffix == ".npz"
    results = options.first.parent if first_is_file else options.first / "results"
    path = (options.out or results) / f"ppl_minus_{second.name}.png"
    plot_difference(found, path)
    write_json(path.with_suffix(".json"), found)
    print(f"{visible(difference_table(found))}\n\nwrote {path}\nwrote {path.with_suffix('.json')}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
