"""The state that a run carries from step to step, and names for its arrays."""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from fwpkm_jax.core.chunks import Memory
from fwpkm_jax.layers.parameters import is_variable
from fwpkm_jax.literals import Checked, Count, NotNegative
from fwpkm_jax.models.language_model import LanguageModel, ModelConfig
from fwpkm_jax.models.sharding import declarations, path_name

Precision = Literal["float32", "parameters"]
"""dtype of trained weights, see `OptimizerConfig.precision`."""

Memories = dict[str, Memory]
"""Fast weights by layer name, leaves `[groups, ...]`."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(Checked):
    """How many fast-weight memories a batch has, and how long they live.

    Example:
      >>> from fwpkm_jax import MemoryConfig, TrainingConfig
      >>> own = MemoryConfig(groups=8, lifetime="batch")  # A fresh one for each of 8 sequences.
      >>> TrainingConfig(batch_size=8, memory=own).memory.groups
      8
    """

    groups: Count = 1
    """Memories per batch. 1: all sequences share one. The batch size: each sequence has its own."""
    lifetime: Literal["carried", "batch"] = "carried"
    """carried: each step starts from the memory that the last step wrote. batch: each batch starts
    from the initial memory."""
    address_loss: NotNegative = 0.0
    """Weight of a loss that draws the query of a question to that of the statement which it asks
    for, in every memory layer (`training.losses.address_loss`). Needs data that say where an answer
    was told; 0: none."""


class TrainState(NamedTuple):
    """All that a step reads and returns. A resumed run needs this and the data position."""

    step: jax.Array
    """int32 scalar, steps taken so far."""
    params: Any
    """Slow weights, an `nnx.State`."""
    opt_state: optax.OptState
    """The optimiser's state; `()` in a state that is only read."""
    memory: Memories
    """Fast weights, leaves `[groups, ...]`. With `lifetime="batch"`: the initial memory, one group,
    of which steps change what layers learn."""
    rng: jax.Array
    """Random key of the training; step n draws from `fold_in(rng, n)`."""


def named_rng(seed: int, name: str) -> jax.Array:
    """The random key of one named stream of a run; streams are independent of each other."""
    return jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))


def model_graph(config: ModelConfig) -> nnx.GraphDef[LanguageModel]:
    """The model's structure, without allocating its parameters."""
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    return nnx.split(model)[0]


def init_state(
    config: ModelConfig,
    *,
    memory: MemoryConfig,
    optimizer: optax.GradientTransformation | None,
    seed: int,
    train: Sequence[str] = (),
    precision: Precision = "float32",
) -> TrainState:
    """The state before the first step.

    Can be traced: `jax.eval_shape` gives shapes and dtypes without allocating arrays.

    Args:
      memory: number and lifetime of memories.
      optimizer: None leaves `opt_state` empty, for reading a finished run.
      seed: the run's seed; parameters, memory and training use separate random streams.
      train: patterns of the parameters that train, see `OptimizerConfig.train`.
      precision: dtype of the weights that `optimizer` trains, see `OptimizerConfig.precision`.

    Raises:
      ValueError: memories whose start is learned are carried from step to step.
    """
    learned = bool(config.memory_layers) and config.fast_weight.rule.learned_start
    if learned and memory.lifetime == "carried":
        raise ValueError(
            "training.memory.lifetime='carried' with first_table='learned': only the first step "
            "would start from what is learned; set lifetime to 'batch', or first_table to 'zeros'."
        )
    model = LanguageModel(config, rngs=nnx.Rngs(params=named_rng(seed, "params")))
    groups = memory.groups if memory.lifetime == "carried" else 1
    params = nnx.state(model)
    if optimizer is not None and precision == "float32":
        params = _in_float32(params, train)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=() if optimizer is None else optimizer.init(trained_part(params, train)),
        memory=model.init_memory(named_rng(seed, "memory"), groups=groups),
        rng=named_rng(seed, "train"),
    )


def _in_float32(params: Any, train: Sequence[str]) -> Any:
    """The parameters, those that train in float32."""
    trained = trained_names(params, train)
    leaves = [
        x.astype(jnp.promote_types(x.dtype, jnp.float32)) if name in trained else x
        for name, x in named_leaves(params).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of `tree` by `path_name`, in the tree's order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves}


ROLE = "role="
"""Begins a pattern of `OptimizerConfig.train` that names roles instead of paths."""


def matching(params: Any, pattern: str) -> list[str]:
    """Paths of the parameters that a pattern of `OptimizerConfig.train` means.

    Raises:
      ValueError: the pattern names roles, and a parameter does not say what it is.
    """
    if not pattern.startswith(ROLE):
        return [name for name in named_leaves(params) if re.fullmatch(pattern, name)]
    roles = {name: declared.role for name, declared in declarations(params).items()}
    return [name for name, role in roles.items() if re.fullmatch(pattern[len(ROLE) :], role)]


def trained_names(params: Any, patterns: Sequence[str]) -> frozenset[str]:
    """Paths of the parameters that train; without patterns, of all."""
    if not patterns:
        return frozenset(named_leaves(params))
    return frozenset(name for pattern in patterns for name in matching(params, pattern))


def trained_part(params: Any, patterns: Sequence[str]) -> Any:
    """The trained parameters by path, each in its variable; without patterns, `params` itself."""
    if not patterns:
        return params
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_variable)
    trained = trained_names(params, patterns)
    return {name: x for path, x in leaves if (name := path_name(path)) in trained}


def with_trained(params: Any, trained: Any, patterns: Sequence[str]) -> Any:
    """`params` with the trained parameters replaced by those in `trained`, from `trained_part`."""
    if not patterns:
        return trained
    new = named_leaves(trained)
    leaves = [new.get(name, x) for name, x in named_leaves(params).items()]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)
