"""One training step: micro-batches, the loss, gradients of the slow weights, the update."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from fwpkm_jax.core.cross_entropy import linear_cross_entropy
from fwpkm_jax.layers.partition import BATCH, HEADS, Partition
from fwpkm_jax.models.block import Remat
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.models.outputs import memory_metrics
from fwpkm_jax.models.sharding import parameter_shardings
from fwpkm_jax.models.statistics import with_statistics
from fwpkm_jax.training.limited import Limited, draw_limited
from fwpkm_jax.training.sharding import state_shardings
from fwpkm_jax.training.state import Memories, MemoryConfig, TrainState

Batch = dict[str, Any]
Metrics = dict[str, jax.Array]


def weighted_loss(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """The sum of the labels' weighted cross-entropies in nats, a scalar.

    Args:
      logits: float `[batch, length, vocab]`.
      labels: int `[batch, length]`.
      weights: float `[batch, length]`; a weight of 0 hides a label from the loss.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * weights)


def readout_loss(
    model: LanguageModel,
    x: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    block: int,
    token_bias: jax.Array | None = None,
    partition: Partition | None = None,
) -> jax.Array:
    """`weighted_loss` of the logits of `x [batch, length, model]`, `block` tokens at a time.

    Over several devices each takes its own tokens, `block` at a time; those along `model` a part of
    each sequence. A bias of each token's own is as large as all logits, which are then formed at
    once.
    """
    if token_bias is not None:
        return weighted_loss(model.logits(x, token_bias), labels, weights)

    def of_tokens(x, head, bias, labels, weights):
        x = x.reshape(-1, x.shape[-1])
        labels, weights = labels.reshape(-1), weights.reshape(-1)
        return linear_cross_entropy(x, head, bias, labels, weights, block=block)

    head, bias = model.readout()
    if partition is None:
        return of_tokens(x, head, bias, labels, weights)

    def of_device(x, head, *rest):
        head = jax.lax.all_gather(head, "fsdp", axis=0, tiled=True)
        return of_tokens(x, head, *rest)[None]

    tokens = P(BATCH, HEADS)
    losses = partition.run(
        of_device,
        in_specs=(tokens, P("fsdp"), P(), tokens, tokens),
        out_specs=P((*BATCH, HEADS)),
    )
    return jnp.sum(losses(x, head, bias, labels, weights))


def check_split(batch_size: int, *, micro_batches: int, memory: MemoryConfig) -> None:
    """Raises ValueError where sequences cannot be dealt evenly to micro-batches and memories."""
    if batch_size % micro_batches:
        raise ValueError(
            f"batch_size={batch_size} does not split into micro_batches={micro_batches}; "
            "make micro_batches a divisor of batch_size."
        )
    if memory.lifetime == "batch":
        if memory.groups % micro_batches:
            raise ValueError(
                f"memory.groups={memory.groups} does not split into micro_batches={micro_batches}: "
                "a memory that lives one batch belongs to one micro-batch; make groups a multiple "
                "of micro_batches, or carry the memory with memory.lifetime=carried."
            )
        if batch_size % memory.groups:
            raise ValueError(
                f"memory.groups={memory.groups} does not divide batch_size={batch_size}; "
                "make it a divisor."
            )
    elif (batch_size // micro_batches) % memory.groups:
        raise ValueError(
            f"memory.groups={memory.groups} does not divide the {batch_size // micro_batches} "
            f"sequences of a micro-batch (batch_size={batch_size}, "
            f"micro_batches={micro_batches}); lower groups or micro_batches."
        )


def split_batch(batch: Batch, *, micro_batches: int, memory: MemoryConfig) -> Batch:
    """The batch with a leading micro-batch axis, each memory keeping its own sequences.

    A batch belongs to its memories in consecutive runs of sequences. Where memories are carried
    every micro-batch holds an equal part of each memory's run; where they live one batch every
    micro-batch holds whole runs, so that the split changes nothing but the order of sums.

    Args:
      batch: arrays `[batch, ...]`.

    Returns:
      Arrays `[micro_batches, batch // micro_batches, ...]`.
    """

    def split(x: jax.Array) -> jax.Array:
        if memory.lifetime == "batch":
            return x.reshape(micro_batches, -1, *x.shape[1:])
        parts = x.reshape(memory.groups, micro_batches, -1, *x.shape[1:])
        return jnp.swapaxes(parts, 0, 1).reshape(micro_batches, -1, *x.shape[1:])

    return jax.tree.map(split, batch)


def deal_batch(batch: Batch, memory: Memories, partition: Partition | None) -> Batch:
    """A micro-batch in the order in which devices that share memories hold its sequences."""
    if partition is None:
        return batch
    groups = jax.tree.leaves(memory)[0].shape[0] if memory else 1
    return jax.tree.map(lambda x: partition.deal(x, groups), batch)


def broadcast_memory(memory: Memories, groups: int) -> Memories:
    """One group's memory, leaves `[1, ...]`, given to each of `groups` groups."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (groups, *x.shape[1:])), memory)


def micro_batch_memory(memory: Memories, config: MemoryConfig, micro_batches: int) -> Memories:
    """The memory a micro-batch starts from, given the one that the state holds."""
    if config.lifetime == "carried":
        return memory
    return broadcast_memory(memory, config.groups // micro_batches)


def make_train_step(
    graphdef: nnx.GraphDef[LanguageModel],
    optimizer: optax.GradientTransformation,
    *,
    schedule: optax.Schedule,
    micro_batches: int,
    memory: MemoryConfig,
    limited: Limited | None = None,
    loss_block: int = 2048,
    remat: Remat | None = None,
    partition: Partition | None = None,
) -> jax.stages.Wrapped:
    """The jitted training step; it consumes (donates) the state it is given.

    The loss is the weighted mean cross-entropy of the whole batch, however it is split. Gradients
    are taken of the slow weights alone: the incoming memory is a constant, and what a micro-batch
    wrote reaches the next one (lifetime `carried`) as a constant too.

    A step whose loss or gradient is not finite leaves parameters and optimiser as they were, so
    that its cause can still be looked for; `step` counts on and the metrics carry the value.

    Args:
      graphdef: the model's structure.
      optimizer: from `make_optimizer`.
      schedule: its learning rate, for the metrics.
      micro_batches: pieces a batch is worked off in, one after the other.
      memory: groups and lifetime.
      limited: another structure for the same weights, for steps that are drawn to use it; both are
        compiled.
      loss_block: tokens whose logits exist at once.
      remat: what the backward pass computes again rather than keep, see `models.block.Remat`.
      partition: of state and batch over devices, laid out as `training.sharding` says; None: all on
        one.

    Returns:
      `step(state, batch) -> (state, metrics)`, metrics float32 scalars: `loss`, `grad_norm` before
      clipping, `param_norm`, `lr`, `layer_<i>/...` for each memory layer, and with `limited`
      `limited`, 1 in the steps that used it.
    """

    def loss_fn(
        params: Any, micro_memory: Memories, micro: Batch, total_weight: jax.Array, graphdef: Any
    ):
        model = nnx.merge(graphdef, params)
        micro = deal_batch(micro, micro_memory, partition)
        output = model.hidden(
            micro["tokens"][:, :-1],
            micro_memory,
            remat=remat,
            partition=partition,
            batch_statistics=True,
        )
        labels, weights = micro["tokens"][:, 1:], micro["loss_weight"]
        loss = readout_loss(
            model,
            output.x,
            labels,
            weights,
            block=loss_block,
            token_bias=output.token_bias,
            partition=partition,
        )
        seen = memory_metrics(output.info), output.pkm_statistics
        return loss / total_weight, (output.memory, seen)

    def gradients(graphdef: Any, params: Any, start: Memories, batch: Batch):
        """Loss, memories after the batch, what layers saw and gradients, of the whole batch."""
        # A batch in which no label counts has no gradient, rather than 0 / 0.
        weight = jnp.sum(batch["loss_weight"])
        total_weight = jnp.where(weight == 0, 1.0, weight)
        value_and_grad = jax.value_and_grad(
            functools.partial(loss_fn, graphdef=graphdef), has_aux=True
        )

        def grad_fn(*arguments):
            value, grads = value_and_grad(*arguments)
            if partition is not None:
                layout = parameter_shardings(partition, grads)
                grads = jax.lax.with_sharding_constraint(grads, layout)
            return value, grads

        def accumulate(carry, micro):
            loss, grads, micro_memory = carry
            (micro_loss, (written, seen)), micro_grads = grad_fn(
                params, micro_memory, micro, total_weight
            )
            grads = jax.tree.map(jnp.add, grads, micro_grads)
            carried = written if memory.lifetime == "carried" else micro_memory
            return (loss + micro_loss, grads, carried), seen

        if micro_batches == 1:
            (loss, (carried, seen)), grads = grad_fn(params, start, batch, total_weight)
        else:
            zeros = jax.tree.map(jnp.zeros_like, params)
            (loss, grads, carried), stacked = jax.lax.scan(
                accumulate,
                (jnp.zeros((), jnp.float32), zeros, start),
                split_batch(batch, micro_batches=micro_batches, memory=memory),
            )
            seen = jax.tree.map(lambda x: jnp.mean(x, axis=0), stacked)
        return loss, carried, seen, grads

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        batch = {name: batch[name] for name in ("tokens", "loss_weight")}
        start = micro_batch_memory(state.memory, memory, micro_batches)
        inputs, drawn = (state.params, start, batch), {}
        if limited is None:
            loss, carried, seen, grads = gradients(graphdef, *inputs)
        else:
            use_limited = draw_limited(state.rng, state.step, limited.probability)
            loss, carried, seen, grads = jax.lax.cond(
                use_limited,
                functools.partial(gradients, limited.graphdef),
                functools.partial(gradients, graphdef),
                *inputs,
            )
            drawn = {"limited": use_limited.astype(jnp.float32)}

        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        layers, statistics = seen
        params = with_statistics(optax.apply_updates(state.params, updates), statistics)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (params, opt_state),
            (state.params, state.opt_state),
        )
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "param_norm": optax.tree.norm(params),
            "lr": jnp.asarray(schedule(state.step), jnp.float32),
            **drawn,
            **layers,
        }
        new_state = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            memory=carried if memory.lifetime == "carried" else state.memory,
            rng=state.rng,
        )
        return new_state, metrics

    if partition is None:
        return jax.jit(step, donate_argnums=0)

    def step_of_parts(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        # The state leaves as it came, so that a compiled step takes it again.
        rule = nnx.merge(graphdef, state.params).config.fast_weight.rule
        layout = state_shardings(partition, state, rule=rule, optimizer=optimizer)
        new_state, metrics = step(state, batch)
        metrics = jax.tree.map(partition.constrain, metrics)
        return jax.lax.with_sharding_constraint(new_state, layout), metrics

    return jax.jit(step_of_parts, donate_argnums=0)
