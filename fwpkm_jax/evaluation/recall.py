"""Accuracy on the generated recall task by distance, with writing enabled and disabled."""

import contextlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.core.chunks import map_unshared
from fwpkm_jax.data import make_dataset
from fwpkm_jax.evaluation import recall_views as views
from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.interface import Evaluation, Outcome, Subject
from fwpkm_jax.evaluation.intervals import share
from fwpkm_jax.evaluation.readers.devices import (
    memory_on_devices,
    model_on_devices,
    rows_on_devices,
)
from fwpkm_jax.evaluation.readers.fast_weight_dtype import as_stored
from fwpkm_jax.evaluation.readers.finite import NONE, likeliest, not_finite
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.literals import Checked, Count
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import Memory


@dataclass(frozen=True, kw_only=True)
class RecallConfig(Checked):
    """Recall of stated facts."""

    batches: Count | None = None
    """Batches of the validation split to score at most. None: all of them."""
    batch_size: Count | None = None
    """Sequences per batch; as many share a memory as in training. None: training's batch size."""
    num_bins: Count = 16
    """Equal ranges of distance, from 0 to the length of a sequence, in the table and the plot."""


class AttentionReach(NamedTuple):
    """How far back attention looks, in tokens; None if it is unbounded."""

    window: int | None
    """Tokens that one layer sees, the current one included."""
    stack: int | None
    """Largest distance in tokens over which information travels through all layers together."""


def attention_reach(config: ModelConfig) -> AttentionReach:
    """The widest window and the reach of the whole stack.

    A layer that sees `window` tokens looks `window - 1` tokens further back than its input.
    """
    mixers = [*config.mixer_configs]
    if config.memory_mixer is not None:
        mixers += [config.memory_mixer] * len(config.memory_layers)
    reaches = [mixer.receptive_field for mixer in mixers]
    windows = [reach for reach in reaches if reach is not None]
    stack = sum(reach - 1 for reach in windows) if len(windows) == len(reaches) else None
    return AttentionReach(max(windows, default=None), stack)


def evaluate(
    subject: Subject,
    config: RecallConfig,
    *,
    batches: Iterable[Mapping[str, np.ndarray]] | None = None,
    num_values: int | None = None,
) -> Outcome:
    """Share of questions answered correctly, overall and by distance from the stated fact.

    An answer is correct if the most likely token of the whole vocabulary is the stated value. The
    forward pass is that of training. The frozen pass reads the same sequences with writing
    disabled, from the memory as it was given.

    Args:
      subject: the model, its memory and how long memories live: "batch" starts every batch from the
        memory, which then has one group; "carried" keeps writes between batches.
      config: how much to score.
      batches: `tokens` `[batch, length + 1]` and `answer_distance` `[batch, length]`; None: the
        validation split of the run's data.
      num_values: number of possible answers, for the accuracy of guessing; None: the run's data's.

    Returns:
      Numbers are `writing` and `frozen`, each with accuracies (`accuracy`, `interval` of 95 %,
      `answers`) for `all`, `beyond_window`, `beyond_reach` and `by_distance`; `chance`, `window`,
      `reach`. Arrays hold every answer's distance and whether each pass got it right.

    Raises:
      ValueError: the batches ask no question, a batch cannot be shared out among the groups, or
        batches or the number of answers are missing.
    """
    data = subject.data
    if num_values is None:
        num_values = None if data is None else data.num_answers
    if num_values is None:
        raise ValueError(
            "num_values=None: give the number of possible answers, or evaluate a run on questions."
        )
    if batches is not None:
        return _score_batches(subject, config, batches, subject.groups, num_values)
    if data is None:
        raise ValueError("batches=None: give batches, or evaluate a run on questions.")
    batch_size, groups = config.batch_size or subject.batch_size, subject.groups
    if subject.lifetime == "batch":
        per_memory = subject.batch_size // groups
        if batch_size % per_memory:
            raise ValueError(
                f"batch_size={batch_size}: in training {per_memory} sequences share a memory; "
                f"choose a multiple of {per_memory}."
            )
        groups = batch_size // per_memory
    total = len(data.source(split="valid", seed=subject.seed)) // batch_size
    forecast = Forecast("recall", total=min(config.batches or total, total), unit="batches")
    dataset = make_dataset(data, split="valid", batch_size=batch_size, seed=subject.seed)
    with contextlib.closing(iter(dataset)) as own:
        return _score_batches(subject, config, own, groups, num_values, forecast)


def _score_batches(
    subject: Subject,
    config: RecallConfig,
    batches: Iterable[Mapping[str, np.ndarray]],
    groups: int,
    num_values: int,
    forecast: Forecast | None = None,
) -> Outcome:
    """The outcome of reading batches whose sequences share `groups` memories."""
    model, lifetime, partition = subject.model, subject.lifetime, subject.partition
    graphdef, params = nnx.split(model_on_devices(partition, model))
    memory = memory_on_devices(partition, subject.memory)
    answer = partial(_answer, graphdef, params, partition=partition)
    distances, right = [], {"writing": [], "frozen": []}
    start = as_stored(_share_out(memory, groups), subject.fast_weight_dtype)
    carried = written = start
    length = 0
    for batch in itertools.islice(batches, config.batches):
        tokens, distance = batch["tokens"], batch["answer_distance"]
        if len(tokens) % groups:
            raise ValueError(
                f"A batch of {len(tokens)} sequences cannot be shared out among {groups} memory "
                f"groups; choose a batch_size that is a multiple of {groups}."
            )
        asked = distance > 0
        length = max(length, distance.shape[1])
        distances.append(distance[asked])
        begin = carried if lifetime == "carried" else start
        for name, first, write in (("writing", begin, True), ("frozen", start, False)):
            correct, finite, after = answer(first, tokens, write=write)
            if not np.all(np.asarray(finite)[asked]):
                raise not_finite(f"recall, {name}")
            right[name].append(np.asarray(correct)[asked])
            written = as_stored(after, subject.fast_weight_dtype) if write else written
        if lifetime == "carried":
            carried = written
        if forecast is not None:
            forecast.add(1)
    distance = np.concatenate(distances) if distances else np.zeros(0, np.int32)
    if not len(distance):
        raise ValueError("The batches ask no question: answer_distance is 0 everywhere.")
    reach = attention_reach(model.config)
    answers = {name: np.concatenate(batches) for name, batches in right.items()}
    # Ranges of distances as wide as each other; the last one ends at `length` or behind it.
    width = -(-length // config.num_bins)
    edges = np.arange(0, length + width, width)
    results = {name: _scores(ok, distance, edges, reach) for name, ok in answers.items()}
    return Outcome(
        numbers=results
        | {"chance": 1 / num_values, "window": reach.window, "reach": reach.stack}
        | {"length": length},
        scored_tokens=len(distance),
        arrays={"distance": distance, **{f"right_{name}": ok for name, ok in answers.items()}},
        mode="training pass",
        resets={"memory": "never" if lifetime == "carried" else "batch", "groups": groups},
    )


@partial(jax.jit, static_argnames=("graphdef", "write", "partition"))
def _answer(
    graphdef: Any,
    params: Any,
    memory: Memory,
    tokens: jax.Array,
    *,
    write: bool,
    partition: Partition | None,
) -> tuple[jax.Array, jax.Array, Memory]:
    """Whether each label `[batch, length]` is the most likely token, whether there is one, and the
    memory afterwards."""
    model, inputs = nnx.merge(graphdef, params), tokens[:, :-1]
    rows = rows_on_devices(partition, model, inputs, memory)
    out = model(rows.tokens, memory, write=write, **rows.options)
    found = likeliest(out.logits)[:, : inputs.shape[1]]
    return found == tokens[:, 1:], found != NONE, out.memory


def _share_out(memory: Memory, groups: int) -> Memory:
    """The memory with `groups` groups: a single group is copied, `groups` groups are kept."""

    def share(leaf: jax.Array) -> jax.Array:
        if leaf.shape[0] not in (1, groups):
            raise ValueError(
                f"The memory has {leaf.shape[0]} groups and groups={groups} are asked for; only a "
                "single group can be copied."
            )
        return jnp.broadcast_to(leaf, (groups, *leaf.shape[1:]))

    return map_unshared(share, memory)


def _scores(
    right: np.ndarray, distance: np.ndarray, edges: np.ndarray, reach: AttentionReach
) -> dict[str, Any]:
    def score(chosen: np.ndarray) -> dict[str, Any] | None:
        return share(int(right[chosen].sum()), int(chosen.sum())) if chosen.any() else None

    def score_beyond(bound: int | None) -> dict[str, Any] | None:
        return None if bound is None else score(distance > bound)

    ranges = [
        {"above": int(low), "up_to": int(high)} | found
        for low, high in itertools.pairwise(edges)
        if (found := score((distance > low) & (distance <= high)))
    ]
    return {
        "all": score(distance > 0),
        "beyond_window": score_beyond(reach.window),
        "beyond_reach": score_beyond(reach.stack),
        "by_distance": ranges,
    }


RECALL = Evaluation(
    name="recall",
    config=RecallConfig,
    evaluate=evaluate,
    data="questions",
    limit="batches",
    title="Recall of stated facts",
    about=(
        "Each sequence states facts, adds other tokens and then asks for the facts; an answer is "
        "right if the most likely token is the stated value. Attention cannot see facts beyond its "
        "window, so right answers there come from the memory and need writing to be enabled."
    ),
    table=views.table,
    plot=views.plot,
    finding=views.finding,
    controls="the same questions with writing disabled, and guessing",
    one_stream=False,
)
