"""Times every mixer on a row of several documents relative to a row that is one.

    taskset -c 1 python -m benchmarks.speed.documents --out build/documents.json

Layers run with their projections, in float32, forward and forward + backward to input and
parameters. Documents have random lengths. Times are CPU seconds of the process; the two kinds of
row take turns, and medians are reported.
"""

import dataclasses
import functools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.machine import environment, write_result
from benchmarks.options import parse
from benchmarks.speed.mixers import cpu_seconds
from fwpkm_jax.layers.mixers import AttentionConfig, LaCTConfig, TitansConfig
from fwpkm_jax.layers.mixers.gated_delta_net import GatedDeltaNetConfig
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMemoryConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.rules.matrix import MATRIX_RULES

MIXERS = (
    *("attention", "swa", "gdn", "lact", "titans", "titans_mac", "titans_mag", "titans_mal"),
    *MATRIX_RULES,
)
_HEAD = 64


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times mixers on rows of documents relative to rows that are one document."""

    mixers: tuple[str, ...] = MIXERS
    """Names of mixers."""
    passes: tuple[Literal["forward", "train"], ...] = ("train",)
    """Passes to time: forward alone, forward + backward."""
    length: int = 4096
    """Tokens of the row."""
    documents: int = 16
    """Documents of the row."""
    heads: int = 2
    """Heads of 64, of which the model is as wide."""
    window: int = 512
    """Tokens that windowed attention sees."""
    persistent: int = 0
    """Persistent tokens of the Titans mixers, before every document."""
    repeats: int = 3
    """Timed turns of each kind of row; medians are reported."""
    out: Path | None = None
    """File for the JSON; None: print it."""


def build(name: str, options: Options) -> nnx.Module:
    """The layer of that name, its heads 64 wide."""
    heads, width = options.heads, options.heads * _HEAD
    shape: dict[str, Any] = {"num_key_heads": heads, "num_value_heads": heads}
    model = ModelConfig(
        vocab_size=8,
        model_dim=width,
        mlp_dim=8,
        mixers=(name,),
        memory_layers=(),
        window=options.window,
        attention=AttentionConfig(num_heads=heads, num_kv_heads=heads, head_dim=_HEAD),
        gdn=GatedDeltaNetConfig(**shape),
        matrix=MatrixMemoryConfig(**shape),
        lact=LaCTConfig(num_heads=heads, num_fast_heads=1, window=options.window),
        titans=TitansConfig(num_heads=1, head_dim=width, num_persistent=options.persistent),
    )
    return model.mixer_configs[0].build(
        width, norm_eps=1e-5, init_std=0.02, dtype=None, rngs=nnx.Rngs(0)
    )


def row_starts(options: Options) -> jax.Array:
    """Starts of documents of random lengths, `[1, length]`."""
    rng = np.random.default_rng(0)
    inner = rng.choice(np.arange(1, options.length), size=options.documents - 1, replace=False)
    starts = np.zeros((1, options.length), bool)
    starts[0, [0, *inner]] = True
    return jnp.asarray(starts)


def measure(name: str, which: str, options: Options) -> dict[str, Any]:
    """Times one mixer on both kinds of row."""
    graphdef, params = nnx.split(build(name, options))
    width = options.heads * _HEAD
    x = jax.random.normal(jax.random.key(0), (1, options.length, width))

    def output(params: Any, x: jax.Array, starts: jax.Array | None) -> jax.Array:
        return jnp.sum(jnp.square(nnx.merge(graphdef, params)(x, starts=starts)[0]))

    run = output if which == "forward" else jax.grad(output, argnums=(0, 1))
    program = jax.jit(run)
    rows = {"one": None, "documents": row_starts(options)}
    calls = {kind: functools.partial(program, params, x, starts) for kind, starts in rows.items()}
    times: dict[str, list[float]] = {kind: [] for kind in rows}
    for turn in range(options.repeats + 1):
        for kind, call in calls.items():
            seconds = cpu_seconds(call)
            if turn:  # The first turn compiles.
                times[kind].append(seconds)
    one, several = (statistics.median(times[kind]) for kind in ("one", "documents"))
    print(f"{which} {name}: {1e3 * one:.0f} ms, {several / one:.2f}", file=sys.stderr)
    return {
        "mixer": name,
        "pass": which,
        "cpu_seconds": {"one": one, "documents": several},
        "relative": several / one,
        "spread": {kind: max(found) - min(found) for kind, found in times.items()},
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all mixers and writes one JSON."""
    options = parse(Options, argv, description=__doc__)
    machine = environment()
    rows = [measure(name, which, options) for which in options.passes for name in options.mixers]
    sizes = dataclasses.asdict(dataclasses.replace(options, out=None))
    names = ("length", "documents", "heads", "window", "persistent", "repeats")
    sizes = {name: sizes[name] for name in names}
    write_result({"environment": machine, **sizes, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
