"""Averages of weights while they train: the schedule-free one, and a moving average beside them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fwpkm_jax.models.sharding import declarations
from fwpkm_jax.training.state import named_leaves, trained_names, trained_part, with_trained


def schedule_free(
    optimizer: optax.GradientTransformation, schedule: optax.Schedule, b1: float
) -> optax.GradientTransformationExtraArgs:
    """`optax.contrib.schedule_free` of weights that are the average x of all iterates.

    optax keeps the points y at which gradients are taken. Whoever reads the weights of a run wants
    x, and does not have the optimiser's state: the step alone goes through y.
    """
    free = optax.contrib.schedule_free(optimizer, schedule, b1=b1)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        at = _between(state, params)
        moves, state = free.update(updates, state, at, **extra)
        average = optax.contrib.schedule_free_eval_params(state, optax.apply_updates(at, moves))
        return _of_trained(lambda old, new: new - old, jnp.zeros_like)(params, average), state

    return optax.GradientTransformationExtraArgs(free.init, update)


def _between(state: optax.contrib.ScheduleFreeState, average: Any) -> Any:
    """The weights at which gradients are taken."""
    b1 = state.b1
    return _of_trained(lambda x, z: b1 * x + (1 - b1) * z, lambda x: x)(average, state.z)


def _of_trained(function: Any, statistic: Any) -> Any:
    """`function` of weights and other trees like them, and `statistic` of running statistics."""

    def mapped(params: Any, *others: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        rest = [jax.tree.leaves(other) for other in others]
        roles = [declared.role for declared in declarations(params).values()]
        new = [
            statistic(x) if role == "statistic" else function(x, *others)
            for role, x, *others in zip(roles, leaves, *rest, strict=True)
        ]
        return jax.tree.unflatten(structure, new)

    return mapped


def gradient_weights(params: Any, opt_state: optax.OptState, train: Sequence[str] = ()) -> Any:
    """The slow weights at which a step takes its gradients.

    Of `schedule_free` they lie between the average and the newest iterate; of every other optimiser
    they are `params`.
    """

    def is_schedule_free(node: Any) -> bool:
        return isinstance(node, optax.contrib.ScheduleFreeState)

    nodes = jax.tree.leaves(opt_state, is_leaf=is_schedule_free)
    for node in nodes:
        if is_schedule_free(node):
            return with_trained(params, _between(node, trained_part(params, train)), train)
    return params


class _WithEma(NamedTuple):
    """An optimiser's state with a moving average of the weights that it trains."""

    inner: optax.OptState
    """The optimiser's own state."""
    steps: jax.Array
    """int32 scalar, steps taken."""
    ema: Any
    """The average, float32, in the structure of the trained weights."""


def with_ema(
    optimizer: optax.GradientTransformation, decay: float
) -> optax.GradientTransformationExtraArgs:
    """The optimiser, which also keeps a moving average of the weights after each step."""

    wrapped = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> _WithEma:
        # A copy, because a step donates weights and state.
        ema = jax.tree.map(lambda x: jnp.copy(x).astype(jnp.float32), params)
        return _WithEma(optimizer.init(params), jnp.zeros((), jnp.int32), ema)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, _WithEma]:
        updates, inner = wrapped.update(updates, state.inner, params, **extra)
        count = state.steps + 1
        share = 1 - jnp.minimum(decay, (count + 1) / (count + 10))
        new = optax.apply_updates(params, updates)
        ema = jax.tree.map(lambda old, x: old + share * (x - old), state.ema, new)
        return updates, _WithEma(inner, count, ema)

    return optax.GradientTransformationExtraArgs(init, update)


EMA = "ema/"
"""Begins the names of the moving average's arrays in the optimiser's state."""


def ema_names(params: Any, *, ema: float | None, train: Sequence[str] = ()) -> list[str]:
    """Paths of the weights of which a run keeps a moving average; running statistics are none.

    Raises:
      ValueError: the run keeps no average.
    """
    if ema is None:
        raise ValueError(
            "weights=ema: the run keeps no moving average of its weights (optimizer.ema is None); "
            "use weights=trained."
        )
    trained = trained_names(params, train)
    roles = {name: declared.role for name, declared in declarations(params).items()}
    return [name for name, role in roles.items() if name in trained and role != "statistic"]


def ema_weights(params: Any, state: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The slow weights with their moving averages in place of those that have one, in float32.

    Args:
      params: slow weights.
      state: leaves of the optimiser's state by name, averages below `EMA`.
      names: of the weights that have one, from `ema_names`.
    """
    averages = {name: state[EMA + name] for name in names}
    leaves = [averages.get(name, x) for name, x in named_leaves(params).items()]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)
