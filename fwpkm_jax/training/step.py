"""One training step: micro-batches, the loss, gradients of the slow weights, the update."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from fwpkm_jax.layers.experts import balance_loss
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.models.outputs import memory_metrics
from fwpkm_jax.models.remat import Remat
from fwpkm_jax.models.sharding import parameter_shardings
from fwpkm_jax.models.statistics import with_statistics
from fwpkm_jax.training import losses
from fwpkm_jax.training.averages import gradient_weights
from fwpkm_jax.training.micro_batches import Batch, deal_batch, micro_batch_memory, split_batch
from fwpkm_jax.training.optimizer import global_norm, side_by_side
from fwpkm_jax.training.random_window import RandomWindow, draw_window
from fwpkm_jax.training.sharding import state_shardings
from fwpkm_jax.training.state import (
    Memories,
    MemoryConfig,
    TrainState,
    trained_part,
    with_trained,
)

Metrics = dict[str, jax.Array]
"""Float32 scalars by name."""

_ADDED = ("balance_loss", "address_loss")
"""Metrics that are part of the trained loss, but not of `loss`."""

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


class _StepConfig(NamedTuple):
    """Settings that determine how loss and gradients are computed."""

    micro_batches: int
    """Pieces of a batch, processed one after the other."""
    memory: MemoryConfig
    """Number of memories, and how long they live."""
    train: tuple[str, ...]
    """Patterns of the parameters that train."""
    loss_block: int
    """Tokens whose logits are in memory at once."""
    remat: Remat | None
    """Which activations the backward pass recomputes, see `models.remat.Remat`."""
    partition: Partition | None
    """Layout of state and batch over devices; None: one device."""


class _Gradients(NamedTuple):
    """Loss, gradients and memories of a batch, before the update of the slow weights."""

    loss: jax.Array
    """Weighted mean cross-entropy, a scalar."""
    memory: Memories
    """The memories after the batch."""
    layers: Metrics
    """Metrics of the memory layers."""
    statistics: Any
    """Batch statistics of the product-key memories' queries, by layer name."""
    grads: Any
    """Gradients of the slow weights."""


def make_train_step(
    graphdef: nnx.GraphDef[LanguageModel],
    optimizer: optax.GradientTransformation,
    *,
    schedule: optax.Schedule,
    micro_batches: int,
    memory: MemoryConfig,
    train: tuple[str, ...] = (),
    windowed: RandomWindow | None = None,
    loss_block: int = 2048,
    remat: Remat | None = None,
    partition: Partition | None = None,
) -> jax.stages.Wrapped:
    """The jitted training step; it donates its input state, which cannot be used afterwards.

    The loss is the weighted mean cross-entropy of the whole batch, for any number of micro-batches.
    Gradients are taken with respect to the slow weights only: the incoming memory is a constant.
    With lifetime `carried`, a micro-batch's memory reaches the next micro-batch as a constant too.

    If the loss or a gradient of a step is not finite, parameters and optimiser state stay as they
    were, so that the cause can still be found. `step` still increases, and the metrics show the
    value.

    Args:
      optimizer: from `make_optimizer`.
      schedule: its learning rate, for the metrics.
      micro_batches: pieces of a batch, processed one after the other.
      memory: groups, lifetime and the weight of `losses.address_loss`, which needs batches with
        `answer_distance`.
      train: patterns of the parameters that train, see `OptimizerConfig.train`.
      windowed: another structure for the same weights, used in randomly drawn steps; both
        structures are compiled.
      loss_block: tokens whose logits are in memory at once.
      remat: which activations the backward pass recomputes, see `models.remat.Remat`.
      partition: of state and batch over devices, laid out as in `training.sharding`; None: one
        device.

    Returns:
      `step(state, batch) -> (state, metrics)`. Metrics are float32 scalars: `loss` in nats,
      `grad_norm` before clipping, `param_norm`, `lr` and `layer_<i>/...` for each memory layer.
      With experts also `balance_loss` and with `address_loss` also that, weighted; they are part
      of the trained loss but not of `loss`. With `windowed` also `windowed`, 1 in the steps that
      used it. With `segment_ids` in the batch also `padding`, the share of inputs that are
      padding.
    """
    config = _StepConfig(micro_batches, memory, train, loss_block, remat, partition)
    if memory.address_loss and partition is not None:
        raise ValueError(
            f"training.memory.address_loss={memory.address_loss} compares all queries of a row on "
            "one device; train on one, or set it to 0."
        )

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        names = ["tokens", "loss_weight", "segment_ids"]
        names += ["answer_distance"] * (memory.address_loss > 0)
        batch = {name: batch[name] for name in names if name in batch}
        found, drawn = _drawn_gradients(graphdef, windowed, state, batch, config)
        if partition is None:
            norm, found = global_norm, found._replace(grads=side_by_side(found.grads))
        else:
            norm = optax.tree.norm
        params, opt_state, grad_norm = _update(state, found, optimizer, train, norm)
        metrics = {
            "loss": found.loss - sum(found.layers.get(name, 0.0) for name in _ADDED),
            "grad_norm": grad_norm,
            "param_norm": norm(params),
            "lr": jnp.asarray(schedule(state.step), jnp.float32),
            **drawn,
            **_padding(batch),
            **found.layers,
        }
        kept = found.memory
        if memory.lifetime == "batch":  # With what layers have learned of their starts.
            kept = nnx.merge(graphdef, params).restart(state.memory)
        new_state = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            memory=kept,
            rng=state.rng,
        )
        return new_state, metrics

    if partition is None:
        return jax.jit(step, donate_argnums=0)

    def step_of_parts(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """The step, with its state laid out as before, as the compiled step expects it."""
        layout = state_shardings(partition, state, graphdef=graphdef)
        new_state, metrics = step(state, batch)
        metrics = jax.tree.map(partition.constrain, metrics)
        return jax.lax.with_sharding_constraint(new_state, layout), metrics

    return jax.jit(step_of_parts, donate_argnums=0)


def _padding(batch: Batch) -> Metrics:
    """The share of inputs that are padding, if the batch has `segment_ids`."""
    if "segment_ids" not in batch:
        return {}
    return {"padding": jnp.mean((batch["segment_ids"] == 0).astype(jnp.float32))}


def _drawn_gradients(
    graphdef: nnx.GraphDef[LanguageModel],
    windowed: RandomWindow | None,
    state: TrainState,
    batch: Batch,
    config: _StepConfig,
) -> tuple[_Gradients, Metrics]:
    """Gradients with the model's structure, or with the windowed one in steps that draw it."""
    start = micro_batch_memory(state.memory, config.memory, config.micro_batches)
    inputs = (gradient_weights(state.params, state.opt_state, config.train), start, batch)
    if windowed is None:
        return _gradients(graphdef, *inputs, config=config), {}
    use_window = draw_window(state.rng, state.step, windowed.probability)
    found = jax.lax.cond(
        use_window,
        functools.partial(_gradients, windowed.graphdef, config=config),
        functools.partial(_gradients, graphdef, config=config),
        *inputs,
    )
    return found, {"windowed": use_window.astype(jnp.float32)}


def _gradients(
    graphdef: nnx.GraphDef[LanguageModel],
    params: Any,
    start: Memories,
    batch: Batch,
    *,
    config: _StepConfig,
) -> _Gradients:
    """Loss, gradients, memories and metrics of the whole batch, over all micro-batches."""
    # If all loss weights are 0, the loss is 0 instead of 0 / 0.
    weight = jnp.sum(batch["loss_weight"])
    total_weight = jnp.where(weight == 0, 1.0, weight)
    value_and_grad = jax.value_and_grad(
        functools.partial(_micro_batch_loss, graphdef=graphdef, config=config), has_aux=True
    )

    trained = trained_part(params, config.train)

    def grad_fn(*arguments: Any) -> Any:
        value, grads = value_and_grad(trained, params, *arguments)
        if config.partition is not None:
            layout = parameter_shardings(config.partition, params)
            layout = trained_part(layout, config.train)
            grads = jax.lax.with_sharding_constraint(grads, layout)
        return value, grads

    if config.micro_batches == 1:
        (loss, (carried, seen)), grads = grad_fn(start, batch, total_weight)
        layers, statistics = seen
        return _Gradients(loss, carried, layers, statistics, grads)

    def accumulate(carry: Any, micro: Batch) -> tuple[Any, Any]:
        loss, grads, micro_memory = carry
        (micro_loss, (written, seen)), micro_grads = grad_fn(micro_memory, micro, total_weight)
        grads = jax.tree.map(jnp.add, grads, micro_grads)
        carried = written if config.memory.lifetime == "carried" else micro_memory
        return (loss + micro_loss, grads, carried), seen

    zeros = jax.tree.map(jnp.zeros_like, trained)
    (loss, grads, carried), stacked = jax.lax.scan(
        accumulate,
        (jnp.zeros((), jnp.float32), zeros, start),
        split_batch(batch, micro_batches=config.micro_batches, memory=config.memory),
    )
    layers, statistics = jax.tree.map(lambda x: jnp.mean(x, axis=0), stacked)
    return _Gradients(loss, carried, layers, statistics, grads)


def _micro_batch_loss(
    trained: Any,
    params: Any,
    memory: Memories,
    micro: Batch,
    total_weight: jax.Array,
    *,
    graphdef: nnx.GraphDef[LanguageModel],
    config: _StepConfig,
) -> tuple[jax.Array, tuple[Memories, tuple[Metrics, Any]]]:
    """A micro-batch's part of the loss, its memories afterwards, its metrics and statistics."""
    model = nnx.merge(graphdef, with_trained(params, trained, config.train))
    if config.memory.lifetime == "batch":
        memory = model.restart(memory)
    micro = deal_batch(micro, memory, config.partition)
    output = model.hidden(
        micro["tokens"][:, :-1],
        memory,
        segment_ids=micro.get("segment_ids"),
        remat=config.remat,
        partition=config.partition,
        batch_statistics=True,
    )
    loss = losses.readout_loss(
        model,
        output.x,
        micro["tokens"][:, 1:],
        micro["loss_weight"],
        block=config.loss_block,
        token_bias=output.token_bias,
        partition=config.partition,
    )
    loss, layers = loss / total_weight, memory_metrics(output.info)
    if output.router_loads:
        balance = model.config.experts.balance_weight * balance_loss(output.router_loads)
        loss, layers["balance_loss"] = loss + balance / config.micro_batches, balance
    if config.memory.address_loss:
        address = _address_loss(output.info, micro)
        loss += config.memory.address_loss * address / config.micro_batches
        layers["address_loss"] = config.memory.address_loss * address
    return loss, (output.memory, (layers, output.pkm_statistics))


def _address_loss(info: Mapping[str, Any], micro: Batch) -> jax.Array:
    """The mean of the memory layers' address losses."""
    if "answer_distance" not in micro or not info:
        raise ValueError(
            "training.memory.address_loss needs a model with memory layers, and data that say "
            "where an answer was told: sessions (data.sessions) or generated facts."
        )
    distance, segments = micro["answer_distance"], micro.get("segment_ids")
    of_layers = [
        losses.address_loss(x.query, distance, segment_ids=segments) for x in info.values()
    ]
    return jnp.mean(jnp.stack(of_layers))


def _update(
    state: TrainState,
    found: _Gradients,
    optimizer: optax.GradientTransformation,
    train: tuple[str, ...],
    norm: Callable[[Any], jax.Array],
) -> tuple[Any, optax.OptState, jax.Array]:
    """New parameters, new optimiser state and the gradient norm.

    Parameters and optimiser state stay as they were if the loss or the norm is not finite.
    """
    grad_norm = norm(found.grads)
    finite = jnp.isfinite(found.loss) & jnp.isfinite(grad_norm)
    old = trained_part(state.params, train)
    optimizer = optax.with_extra_args_support(optimizer)
    updates, opt_state = optimizer.update(found.grads, state.opt_state, old, grad_norm=grad_norm)
    params = with_trained(state.params, optax.apply_updates(old, updates), train)
    trained = trained_part(with_statistics(params, found.statistics), train)
    trained, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), (trained, opt_state), (old, state.opt_state)
    )
    return with_trained(state.params, trained, train), opt_state, grad_norm
