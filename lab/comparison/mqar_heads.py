"""Watches, head by head, whether a matrix memory's queries come to match its keys.

    taskset -c 1 python -m lab.comparison.mqar_heads --memories deltanet mesa

The runs are those of `mqar.py` in its setting `stacked`, with the same documents, weights and
rates. Of validation's documents and each head, every line has the share of questions whose query is
nearer to the key under which their pair was stated than to any other key of the document
(`nearest`), or farther from it than from any other (`farthest`; a head may read with its sign
reversed), the mean cosine with that key (`own`) and with the others (`others`), and the mean write
strength where pairs are stated and where they are asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.machine import environment_once
from benchmarks.options import parse
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMemory
from fwpkm_jax.rules.matrix import MATRIX_RULES
from lab.comparison.mqar_decoder import Decoder, Layout
from lab.comparison.mqar_tables import changes
from lab.comparison.mqar_tasks import Documents, Task, cell_of, documents
from lab.comparison.mqar_training import Training, documents_of, rate_in
from lab.comparison.small_decoders import Lines, Row


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains runs and looks at the memory after each epoch."""

    memories: tuple[str, ...] = ("deltanet",)
    """Matrix memories."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights and documents."""
    rate: float = 3.16e-3
    """Learning rate."""
    warmup: int = 0
    """Updates over which the learning rate rises from 0."""
    tied_start: bool = False
    """Keys begin as the queries of the same token."""
    width: int = 64
    """Width of the residual stream, of two heads."""
    batch_size: int = 64
    """Documents per update."""
    documents: int = 1280
    """Training documents of each number of pairs."""
    epochs: int = 8
    """Passes over the documents after which the rate would be 0."""
    watched: int = 8
    """Passes that are made."""
    pairs: int = 16
    """Pairs of the documents that are looked at."""
    out: Path = Path("lab/results/mqar_heads_cpu.jsonl")
    """File of the results; an existing file is continued."""


def matches(model: Decoder, made: Documents) -> dict[str, list[float]]:
    """By head, how queries match keys, and write strengths; see above.

    Args:
      model: of one layer, a matrix memory.
      made: stacked documents.
    """
    mixer = model.layers[0]
    assert isinstance(mixer, MatrixMemory)
    assert mixer.conv_weight is None, "a stacked layer has no convolution"
    x = model.norms[0](model.embed(jax.numpy.asarray(made.tokens)))
    tokens = mixer.tokens(x, mixer.in_proj(x)[..., : sum(mixer.widths)])
    query, key = (np.asarray(leaf) for leaf in (tokens.query, tokens.key))
    rows, pairs = np.arange(len(made.tokens))[:, None], made.positions.shape[1]
    key = key.reshape(len(x), x.shape[1], -1, *key.shape[2:])[:, :pairs, 0]  # The first step's.
    query = query[rows, made.positions]
    query, key = (y / np.linalg.norm(y, axis=-1, keepdims=True) for y in (query, key))
    cosines = np.einsum("bqhd,bkhd->bqkh", query, key)
    asked = np.take_along_axis(made.tokens[..., 0], made.positions, axis=1)
    own = asked[:, :, None] == made.tokens[:, None, :pairs, 0]
    found = {"own": cosines[own].mean(0), "others": cosines[~own].mean(0)}
    for name, place in (("nearest", cosines.argmax(2)), ("farthest", cosines.argmin(2))):
        found[name] = np.take_along_axis(own[..., None], place[:, :, None], axis=2).mean((0, 1, 2))
    if tokens.strength is not None:
        strength = np.asarray(tokens.strength)
        strength = strength.reshape(len(x), x.shape[1], -1, *strength.shape[2:]).mean(2)
        strength = strength.reshape(*strength.shape[:3], -1).mean(-1)
        found["stated"] = strength[:, :pairs].mean((0, 1))
        found["asked"] = strength[rows, made.positions].mean((0, 1))
    return {name: [round(float(x), 4) for x in by_head] for name, by_head in found.items()}


def measure(name: str, seed: int, options: Options) -> Row:
    """What each watched epoch left, and the loss of its updates."""
    layout = Layout(width=options.width, chunk=4, stacked=True, tied_start=options.tied_start)
    training = Training(
        name,
        layout,
        batch_size=options.batch_size,
        rows=min(16, options.batch_size),
        length=2 * options.pairs,
        warmup=options.warmup,
    )
    parts = cell_of("stacked", pairs=0, length=0).train
    parts = [part._replace(documents=options.documents) for part in parts]
    train = documents_of(parts, "train", seed)
    (block,) = training.blocks(train, 1)
    task = Task(pairs=options.pairs, length=2 * options.pairs, stacked=True)
    made = documents(task, 64, split="valid", seed=seed)
    state, frozen = training.start(seed)
    curve: list[dict[str, Any]] = []
    for epoch in range(options.watched):
        rate = rate_in(epoch, options.epochs, options.rate)
        state, loss = training.train(state, frozen, block, rate=rate, seed=seed)
        found = matches(training.model(state.params, frozen), made)
        curve.append({"step": int(state.step), "loss": round(loss, 4), **found})
    return {"curve": curve}


def table(rows: Sequence[Row]) -> str:
    """The curves as Markdown; numbers of heads side by side."""
    heads = ["memory", "seed", "start", "updates", "loss", "own key nearest"]
    heads += [
        "farthest",
        "cosine with own key",
        "with others",
        "strength where stated",
        "where asked",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        for point in row["curve"]:
            start = ", ".join(changes(row["settings"])) or "as published"
            cells = [f"`{row['memory']}`", str(row["seed"]), start]
            cells += [str(point["step"]), f"{point['loss']:.2f}"]
            for key in ("nearest", "farthest", "own", "others", "stated", "asked"):
                cells.append(", ".join(f"{x:.2f}" for x in point.get(key, ())))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the lines that the file lacks, and prints the table of all."""
    options = parse(Options, argv, description=__doc__)
    if unknown := [name for name in options.memories if name not in MATRIX_RULES]:
        raise SystemExit(f"--memories: {unknown} are none of {tuple(MATRIX_RULES)}.")
    lines = Lines(options.out)
    names = ("rate", "warmup", "width", "batch_size", "documents", "epochs", "watched", "pairs")
    settings = {name: getattr(options, name) for name in names}
    if options.tied_start:
        settings["tied_start"] = True
    for name in options.memories:
        for seed in options.seeds:
            about = {"memory": name, "seed": seed, "settings": settings}
            if not lines.find(**about):
                found = measure(name, seed, options)
                lines.add(about | found | {"environment": environment_once()})
            jax.clear_caches()
    print(table(lines.rows))


if __name__ == "__main__":
    main()
