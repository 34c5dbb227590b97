"""Loss on held-out batches while training."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.training.losses import weighted_loss
from fwpkm_jax.training.micro_batches import (
    Batch,
    check_split,
    deal_batch,
    micro_batch_memory,
    split_batch,
)
from fwpkm_jax.training.sharding import put_batch
from fwpkm_jax.training.state import Memories, MemoryConfig

Validation = Callable[[LanguageModel, Memories], dict[str, float]]
"""Called with a model and a memory, which it does not change; returns metrics by name. The lowest
`loss` marks the best checkpoint."""


def make_validation(
    batches: Sequence[Batch],
    *,
    memory: MemoryConfig,
    micro_batches: int = 1,
    partition: Partition | None = None,
) -> Validation:
    """A function that measures the loss and the answer accuracy on fixed batches.

    Each batch starts from the given memory and writes to a copy of it, as in training; the copy is
    dropped.

    Args:
      batches: held-out batches, all of one shape, with the rows of this process only.
      memory: groups and lifetime, as in training.
      micro_batches: as in training, to limit the device memory needed.
      partition: as in training.

    Returns:
      `validate(model, memory) -> {"loss": nats per label}`, with `answer_accuracy`, 0 to 1, if the
      batches mark answers (`answer_distance` above 0).

    Raises:
      ValueError: there is no batch, or its rows do not divide into micro-batches and memories.
    """
    if not batches:
        raise ValueError("There is no batch to validate on.")
    if partition is None:  # With one, a process may hold only some of the rows.
        check_split(len(batches[0]["tokens"]), micro_batches=micro_batches, memory=memory)

    def sums(graphdef: Any, params: Any, start: Memories, batch: Batch) -> jax.Array:
        def one(_: None, micro: Batch) -> tuple[None, jax.Array]:
            micro = deal_batch(micro, start, partition)
            model = nnx.merge(graphdef, params)
            output = model(
                micro["tokens"][:, :-1],
                start,
                segment_ids=micro.get("segment_ids"),
                partition=partition,
            )
            labels, weights = micro["tokens"][:, 1:], micro["loss_weight"]
            loss = weighted_loss(output.logits, labels, weights)
            answers = micro.get("answer_distance", jnp.zeros_like(labels)) > 0
            right = jnp.sum(answers & (jnp.argmax(output.logits, axis=-1) == labels))
            return None, jnp.stack([loss, jnp.sum(weights), right, jnp.sum(answers)])

        start = micro_batch_memory(start, memory, micro_batches)
        pieces = split_batch(batch, micro_batches=micro_batches, memory=memory)
        return jnp.sum(jax.lax.scan(one, None, pieces)[1], axis=0)

    everywhere = None if partition is None else partition.sharding()
    jitted = jax.jit(sums, static_argnums=0, out_shardings=everywhere)

    def validate(model: LanguageModel, start: Memories) -> dict[str, float]:
        graphdef, params = nnx.split(model)
        totals = sum(
            jitted(graphdef, params, start, put_batch(partition, batch)) for batch in batches
        )
        loss, weight, right, answers = (float(x) for x in jax.device_get(totals))
        values = {"loss": loss / max(weight, 1e-9)}
        if answers:
            values["answer_accuracy"] = right / answers
        return values

    return validate
