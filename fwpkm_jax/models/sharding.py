"""Which mesh axis splits which dimension of each slow weight: one table of rules."""

import functools
import re
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fwpkm_jax.layers.partition import HEADS, Partition

LogicalAxes = tuple[str | None, ...]

_MIXER = r".*mixer/((memory|attention|gate)/)?"  # Titans' wirings have parts.

RULES: tuple[tuple[str, LogicalAxes], ...] = (
    (r"embedding", ("vocab", "embed")),
    (r"head", ("embed", "vocab")),
    (r"head_bias", (None,)),
    (r"(.*/)?\w*norm/weight", (None,)),
    # Attention and LaCT; heads one after the other.
    (rf"{_MIXER}[qkv]_proj/kernel", ("embed", "heads")),
    (rf"{_MIXER}o_proj/kernel", ("heads", "embed")),
    # Gated DeltaNet.
    (r".*mixer/in_proj_(qkvz|ba)/kernel", ("embed", "heads")),
    (rf"{_MIXER}out_proj/kernel", ("heads", "embed")),
    (r".*mixer/(A_log|dt_bias)", ("heads",)),
    (r".*mixer/conv_weight", (None, None)),
    # LaCT: a memory per sequence and head, computed whole on every device of its sequence.
    (rf"{_MIXER}(qkv|rate|momentum|scale)_proj/kernel", ("embed", None)),
    (rf"{_MIXER}(rate|momentum|scale)_proj/bias", (None,)),
    (r".*mixer/fast_(query|key)_(scale|shift)", (None,)),
    (r".*mixer/((gate|up)_(left|right)|down)", (None, None, None)),
    # Titans and its persistent tokens, likewise.
    (rf"{_MIXER}(query|key|value|pool|gate)_proj/kernel", ("embed", None)),
    (rf"{_MIXER}(forget|combine|tensor_rate)_proj/kernel", ("embed", None)),
    (rf"{_MIXER}(forget|combine|tensor_rate)_proj/bias", (None,)),
    (rf"{_MIXER}layers/\d+", (None, None, None)),
    (rf"{_MIXER}(scale|(query|key|output)_norm)", (None, None)),
    (rf"{_MIXER}tokens", (None, "embed")),
    # Matrix memories, likewise.
    (r".*mixer/(in|strength)_proj/kernel", ("embed", None)),
    (r".*mixer/decay_proj/(layers/\d+/)?kernel", (None, None)),
    (r".*mixer/(decay|strength)_proj/(layers/\d+/)?bias", (None,)),
    (r".*mixer/log_rate", (None,)),
    # Fast Weight Layer.
    (r"fast_weight_layer/tensors/up", ("embed", None)),
    (r"fast_weight_layer/tensors/down", (None, "embed")),
    (
        r"fast_weight_layer/(tensors/(up_bias|down_bias|scale|shift)|log_rates|decay_logits)",
        (None,),
    ),
    # SwiGLU, and the gate of a product-key memory.
    (r".*feed_forward/(gate|up)_proj/kernel", ("embed", "mlp")),
    (r".*feed_forward/gate_proj/bias", ("mlp",)),
    (r".*feed_forward/(down|out)_proj/kernel", ("mlp", "embed")),
    (r".*feed_forward/out_proj/bias", (None,)),
    # Product-key memory.
    (r".*feed_forward/values", ("slots", "columns")),
    (r".*feed_forward/keys", (None, None, None, None)),
    (r".*feed_forward/query_(scale|shift|mean|variance)", (None,)),
    (r".*feed_forward/query_proj/kernel", ("embed", None)),
    (r".*feed_forward/query_proj/bias", (None,)),
    # Fast-weight memory: all devices of a sequence find its slots.
    (r".*memory/(query|value|gate)_proj/kernel", ("embed", None)),
    (r".*memory/out_proj/kernel", (None, "embed")),
    (r".*memory/\w+_proj/bias", (None,)),
)
"""A pattern for a whole name, and what the dimensions are called; the first match holds."""


def path_name(path: Any) -> str:
    """A pytree path as `blocks/0/mixer/kernel`, the way errors and checkpoints name arrays."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    # Flax variables are pytree nodes with one child; whether its key shows differs by version.
    return name.removesuffix("/value")


def mesh_axes(partition: Partition) -> dict[str, tuple[str, ...]]:
    """The mesh axes of each logical axis; an axis not listed is whole on every device."""
    slots, columns = partition.table_spec(learned=True)
    return {
        "embed": ("fsdp",),
        "heads": (HEADS,),
        "mlp": (HEADS,),
        "slots": slots,
        "columns": columns,
    }


def logical_axes(name: str) -> LogicalAxes:
    """What the dimensions of a parameter are.

    Raises:
      ValueError: no rule matches its name.
    """
    for pattern, axes in RULES:
        if re.fullmatch(pattern, name):
            return axes
    raise ValueError(f"The parameter {name} matches none of models.sharding.RULES; add one.")


def parameter_spec(partition: Partition, name: str, shape: tuple[int, ...]) -> P:
    """How a parameter is split.

    Args:
      partition: the mesh.
      name: its path, as `blocks/0/mixer/o_proj/kernel`.
      shape: its shape.

    Raises:
      ValueError: no rule matches, its rule is for another rank, or a dimension does not divide.
    """
    logical, to_mesh = logical_axes(name), mesh_axes(partition)
    if len(logical) != len(shape):
        raise ValueError(f"The rule of the parameter {name} names {logical}, its shape is {shape}.")
    spec = []
    for axis, size in zip(logical, shape, strict=True):
        along = to_mesh.get(axis, ()) if axis is not None else ()
        parts = partition.size(*along)
        if size % parts:
            raise ValueError(
                f"The {axis} dimension of {name} {shape}, {size}, does not divide into {parts} "
                f"parts ({', '.join(f'mesh.{a}={partition.size(a)}' for a in along)}); choose "
                "divisors of it."
            )
        spec.append(along if parts > 1 else None)
    return P(*spec)


def parameter_shardings(partition: Partition, params: Any) -> Any:
    """The layout of every slow weight, in the shape of `params` (arrays or their shapes)."""

    def of(path: Any, leaf: Any) -> NamedSharding:
        spec = parameter_spec(partition, path_name(path), leaf.shape)
        return NamedSharding(partition.mesh, spec)

    return jax.tree_util.tree_map_with_path(of, params)


def gathered(partition: Partition | None, module: Any, name: str) -> Any:
    """A module with what FSDP has split made whole, for use; its gradients are split again.

    Args:
      partition: None leaves the module as it is.
      module: a module or parameter.
      name: its path in the model, for the rules.
    """
    if partition is None or partition.size("fsdp") == 1:
        return module

    def gather(path: Any, leaf: jax.Array) -> jax.Array:
        full = "/".join(part for part in (name, path_name(path)) if part)
        spec = parameter_spec(partition, full, leaf.shape)
        if "embed" not in logical_axes(full):
            return leaf
        whole = P(*(None if axis == ("fsdp",) else axis for axis in spec))
        return _gather(partition.sharding(*whole), partition.sharding(*spec), leaf)

    return jax.tree_util.tree_map_with_path(gather, module)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(whole: NamedSharding, split: NamedSharding, weight: jax.Array) -> jax.Array:
    del split
    return jax.lax.with_sharding_constraint(weight, whole)


def _gather_forward(whole, split, weight):
    return _gather(whole, split, weight), None


def _gather_backward(whole, split, _, gradient):
    del whole
    return (jax.lax.with_sharding_constraint(gradient, split),)


_gather.defvjp(_gather_forward, _gather_backward)
