"""Lets the product-key memory of a model learn what FwPKM has read, and measures what it keeps.

    python -m lab.study.plain_text --kinds pkm_fwpkm --rates 4e-3 --steps 400
    python -m lab.study.consolidation
    python -m lab.study.consolidation --tables

The models have a product-key memory (PKM, slow weights) in an earlier layer than FwPKM. While text
goes by, its values take steps of stochastic gradient descent, one per batch; only slots that were
read have a gradient. FwPKM is the teacher: the PKM learns to give the model without what FwPKM has
read the predictions that the trained model has with it. Controls are the next byte in place of
those predictions, the weights of the MLPs in place of the PKM's values, and smaller steps of FwPKM.
Six domains are read one after the other, as in `lab.study.retention`, whose tables these
are. Each result is a line of JSON; those in the file are skipped.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn import one_hot

from benchmarks.machine import environment_once
from benchmarks.options import parse
from fwpkm_jax.data import TextData
from fwpkm_jax.evaluation.continual.domains import read_domains
from fwpkm_jax.evaluation.readers.whole_pass import frozen_row_losses, write_rows
from fwpkm_jax.models.language_model import Memory
from fwpkm_jax.run import Run, load_run
from fwpkm_jax.training.state import trained_part, with_trained
from lab.study.retention import CONTROL, METHODS, Line, Lines, Method, written_so
from lab.study.retention_domains import Rows, changes_by_domain, orders
from lab.study.retention_facts import without_history
from lab.study.retention_tables import (
    domains_table,
    draw,
    each_domain_table,
    without_plain,
)
from lab.study.study import DATA, DOMAINS

SPARSE = r"blocks/\d+/feed_forward/values"
"""The tables of the product-key memories."""
DENSE = r"blocks/\d+/feed_forward/(up|gate|down)_proj/kernel"
"""The weights of the MLPs, and of a product-key memory's gate."""


@dataclass(frozen=True)
class Way:
    """What learns while text goes by."""

    teacher: Literal["memory", "text"] | None = None
    """What the slow weights learn: the predictions of the trained model with its fast memory, the
    next byte, or nothing."""
    trained: str = SPARSE
    """Pattern of the slow weights that learn."""
    carried: bool = True
    """Whether the fast memory goes on from domain to domain; otherwise each starts anew, and the
    losses are those of the fast memory that training left."""
    write: str = "plain"
    """How the fast memory is written, of `retention.METHODS`."""


HARDENED = "keys still, hardening 1, 6 inner steps"
WAYS: dict[str, Way] = {
    "plain": Way(),
    "step 0.5": Way(write="step 0.5"),
    "step 0.25": Way(write="step 0.25"),
    "hardened": Way(write=HARDENED),
    "consolidated": Way(teacher="memory", carried=False),
    "text": Way(teacher="text", carried=False),
    "consolidated, carried": Way(teacher="memory"),
    "hardened, consolidated, carried": Way(teacher="memory", write=HARDENED),
    "text, carried": Way(teacher="text"),
    "text, dense": Way(teacher="text", carried=False, trained=DENSE),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measures what a product-key memory keeps of what a fast memory has read."""

    runs: tuple[Path, ...] = tuple(
        Path(f"runs/study/plain_text/pkm_fwpkm_0.004_400_seed{n}") for n in range(3)
    )
    """Run directories of models with both memories."""
    ways: tuple[str, ...] = tuple(WAYS)
    """What learns; see `WAYS`."""
    rates: tuple[float, ...] = (0.03,)
    """Steps of the slow weights, of a loss summed over a batch's tokens."""
    orders: tuple[str, ...] = tuple(orders(DOMAINS))
    """Orders of the domains."""
    data: Path = DATA / "domains"
    """Folder that holds one folder per domain."""
    batches: int = 32
    """Rows of each domain that each of a run's memories reads at most."""
    eval_batches: int = 8
    """Rows of each domain that each of these is evaluated on at most."""
    out: Path = Path("lab/results/consolidation_cpu.jsonl")
    """File of the results, which are added to."""
    tables: bool = False
    """Only prints the tables of the lines in `out`, and draws the picture."""
    image: Path = Path("docs/images/consolidation.png")
    """File of the picture: forgetting against adaptation of all that FwPKM writes or teaches."""


class Memories(NamedTuple):
    """What changes while text goes by."""

    slow: dict[str, jax.Array]
    """The slow weights that learn, by parameter name."""
    fast: Memory
    """FwPKM's fast weights, leaves `[groups, ...]`."""


def cross_entropy(logits: jax.Array, target: jax.Array) -> jax.Array:
    """Cross-entropy to what is learned, summed over tokens, in nats.

    Args:
      logits: `[batch, length, vocab]`.
      target: probabilities of that shape; tokens whose probabilities are all 0 do not count.
    """
    return -jnp.sum(target * jax.nn.log_softmax(logits))


@partial(jax.jit, static_argnames=("graphdef", "student", "way"))
def read_and_consolidate(
    graphdef: Any,
    student: Any,
    params: Any,
    memories: Memories,
    start: Memory,
    tokens: jax.Array,
    *,
    rate: float,
    way: Way,
) -> Memories:
    """Both memories after a batch of rows.

    The student reads with `start`, which stays, and learns. The fast memory is written by the
    teacher, which has the slow weights of training, or by a model with the student's if the text
    is what is learned.

    Args:
      graphdef: structure of the model that writes.
      student: structure of the model with the plain write, for the memory `start`.
      params: slow weights of training.
      memories: before the batch; `slow` takes the place of those weights in the student.
      start: the fast memory of a student that has read nothing.
      tokens: int `[groups, length + 1]`; the last token of a row is not read.
      rate: of the step.
      way: what learns what.
    """
    assert way.teacher is not None
    teacher, patterns, inputs = way.teacher, (way.trained,), tokens[:, :-1]
    own = with_trained(params, memories.slow, patterns)
    read = nnx.merge(graphdef, params if teacher == "memory" else own)(inputs, memories.fast)
    vocab = read.logits.shape[-1]
    target = jax.nn.softmax(read.logits) if teacher == "memory" else one_hot(tokens[:, 1:], vocab)

    def loss(slow: dict[str, jax.Array]) -> jax.Array:
        model = nnx.merge(student, with_trained(params, slow, patterns))
        return cross_entropy(model(inputs, start, write=False).logits, target)

    gradients = jax.grad(loss)(memories.slow)
    slow = {name: x - rate * gradients[name] for name, x in memories.slow.items()}
    return Memories(slow, read.memory)


def domains_line(run: Run, way: Way, rate: float, order: Sequence[str], options: Options) -> Line:
    """What a run gains from domains in an order, and loses again, see `changes_by_domain`.

    `read_cpu_seconds` are those of each domain but the first, which also compiles.
    """
    text = run.experiment.data
    assert isinstance(text, TextData)
    model, start = written_so(run, METHODS[way.write])
    graphdef, params = nnx.split(model)
    student = nnx.split(written_so(run, Method())[0])[0]
    patterns = (way.trained,)
    slow = trained_part(params, patterns)
    if not slow:
        raise SystemExit(
            f"{run.experiment.run_dir}: the model has no {way.trained} that can learn."
        )
    frozen = without_history(start)
    cpu_seconds: list[float] = []

    def read(memories: Memories, rows: Rows) -> Memories:
        began = time.process_time()
        if not way.carried:
            memories = memories._replace(fast=start)
        for batch in rows:
            if way.teacher is None:
                fast, _ = write_rows(
                    *(graphdef, params, memories.fast, batch), fast_weight_dtype="float32"
                )
                memories = memories._replace(fast=fast)
            else:
                memories = read_and_consolidate(
                    *(graphdef, student, params, memories, frozen, batch),
                    rate=rate,
                    way=way,
                )
        jax.block_until_ready(memories)
        cpu_seconds.append(time.process_time() - began)
        return memories

    def losses(memories: Memories, batch: np.ndarray) -> jax.Array:
        fast = without_history(memories.fast) if way.carried else frozen
        own = with_trained(params, memories.slow, patterns)
        return frozen_row_losses(student, own, fast, batch)

    sizes = {"batches": options.batches, "eval_batches": options.eval_batches}
    change = changes_by_domain(
        Memories(slow, jax.tree.map(jnp.copy, start)),  # `write_rows` donates its buffers.
        read_domains([f"{name}={options.data / name}" for name in order], text),
        read=read,
        losses=losses,
        groups=jax.tree.leaves(start)[0].shape[0],
        **sizes,
    )
    return {
        "change": change,
        "settings": sizes,
        "read_cpu_seconds": [round(seconds, 2) for seconds in cpu_seconds[1:]],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the file lacks, and prints the tables of all its lines."""
    options = parse(Options, argv, description=__doc__)
    if unknown := set(options.ways) - set(WAYS):
        raise SystemExit(f"--ways: {sorted(unknown)} are none of {tuple(WAYS)}.")
    lines, named = Lines(options.out), orders(DOMAINS)
    for path in () if options.tables else options.runs:
        run = load_run(path)
        asked = [
            (name, rate)
            for name in options.ways
            for rate in (options.rates if WAYS[name].teacher else (0.0,))
        ]
        for (name, rate), order in itertools.product(asked, options.orders):
            method = f"{name}, {rate:g}" if rate else name
            what = {"measure": "domains", "run": path.name, "method": method, "order": order}
            what |= {"batches": options.batches}
            if lines.has(**what):
                continue
            began = time.monotonic()
            found = domains_line(run, WAYS[name], rate, named[order], options)
            seconds = round(time.monotonic() - began, 1)
            lines.add({**what, **found, "seconds": seconds, "environment": environment_once()})
            print(f"{what}: {seconds} s", flush=True)
    if lacking := without_plain(lines.all):
        raise SystemExit(
            f"{options.out}: {lacking} lack plain, with which the tables compare; measure it with "
            "--ways plain."
        )
    print(domains_table(lines.all), each_domain_table(lines.all), sep="\n\n")
    ours = [line for line in lines.all if not line["method"].startswith("text")]
    draw(options.image, [x for x in ours if x["batches"] == options.batches], control=CONTROL)


if __name__ == "__main__":
    main()
