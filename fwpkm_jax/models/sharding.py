"""Which mesh axis splits which dimension of each slow weight.

Every module names the dimensions of its parameters in `parameter_axes` (see
`layers.partition.ParameterAxes`); `mesh_axes` maps these names to axes of the mesh.
"""

import functools
import re
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fwpkm_jax.layers.lora import FACTORS
from fwpkm_jax.layers.partition import HEADS, LogicalAxes, Partition


def path_name(path: Any) -> str:
    """A pytree path in the form `blocks/0/mixer/kernel`, as in errors and checkpoints."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    # A Flax variable is a pytree node with one child; only some versions show the child's key.
    return name.removesuffix("/value")


def mesh_axes(partition: Partition) -> dict[str, tuple[str, ...]]:
    """The mesh axes that split each logical axis; an axis that is not listed is not split."""
    slots, columns = partition.table_spec(learned=True)
    return {
        "embed": ("fsdp",),
        "heads": (HEADS,),
        "mlp": (HEADS,),
        "experts": (HEADS,),
        "slots": slots,
        "columns": columns,
    }


def logical_axes(module: nnx.Module, path: Any, shape: tuple[int, ...]) -> LogicalAxes:
    """Names of a parameter's dimensions, from the innermost module that declares them.

    Args:
      module: the module that holds the parameter, at any depth.
      path: pytree path of the parameter within `module`.
      shape: shape of the parameter.

    Raises:
      ValueError: no module declares the parameter, or the number of axes differs from its rank.
    """
    keys = path_name(path).split("/")
    if keys[-1] in FACTORS:  # Thin parts of the kernel beside them.
        inputs, outputs = _declared_axes(module, [*keys[:-1], "kernel"], (0, 0))
        return (inputs, None) if keys[-1] == FACTORS[0] else (None, outputs)
    return _declared_axes(module, keys, shape)


def _declared_axes(module: nnx.Module, keys: list[str], shape: tuple[int, ...]) -> LogicalAxes:
    inner: Any = module
    holders = [(inner, keys)]
    for at, key in enumerate(keys[:-1], start=1):
        inner = inner[int(key)] if key.isdigit() else getattr(inner, key)
        holders.append((inner, keys[at:]))
    for holder, rest in reversed(holders):
        for pattern, axes in getattr(holder, "parameter_axes", {}).items():
            if re.fullmatch(pattern, "/".join(rest)):
                axes = (None,) * len(shape) if axes is None else axes
                if len(axes) != len(shape):
                    raise ValueError(
                        f"parameter_axes of {type(holder).__name__} names {axes} for "
                        f"{'/'.join(rest)}, its shape is {shape}."
                    )
                return axes
    raise ValueError(
        f"The parameter {'/'.join(keys)} of {type(module).__name__} matches no parameter_axes; add "
        f'"{"/".join(keys)}": None to those of {type(module).__name__} to keep it whole on every '
        "device, or name its dimensions."
    )


def parameter_spec(
    partition: Partition, axes: LogicalAxes, shape: tuple[int, ...], *, name: str
) -> P:
    """The partition spec of a parameter.

    Args:
      partition: the mesh.
      axes: names of its dimensions, from `logical_axes`.
      shape: its shape.
      name: its path, for the error message.

    Raises:
      ValueError: a dimension does not divide into the parts of the mesh.
    """
    to_mesh, spec = mesh_axes(partition), []
    for axis, size in zip(axes, shape, strict=True):
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


def parameter_shardings(partition: Partition, params: Any, *, graphdef: nnx.GraphDef[Any]) -> Any:
    """The sharding of every slow weight, in the tree structure of `params`.

    Args:
      partition: the mesh.
      params: arrays or their shapes.
      graphdef: the structure of the model they belong to.
    """
    model = nnx.merge(graphdef, params)

    def of(path: Any, leaf: Any) -> NamedSharding:
        axes = logical_axes(model, path, leaf.shape)
        return NamedSharding(
            partition.mesh, parameter_spec(partition, axes, leaf.shape, name=path_name(path))
        )

    return jax.tree_util.tree_map_with_path(of, params)


def gathered(partition: Partition | None, module: Any, name: str) -> Any:
    """A module with the weights that FSDP splits gathered on every device.

    The backward pass splits their gradients again.

    Args:
      partition: None leaves the module as it is.
      module: the module.
      name: its path in the model, for errors.
    """
    if partition is None or partition.size("fsdp") == 1:
        return module

    def gather(path: Any, leaf: jax.Array) -> jax.Array:
        axes = logical_axes(module, path, leaf.shape)
        return gathered_array(partition, leaf, axes, name=f"{name}/{path_name(path)}")

    return jax.tree_util.tree_map_with_path(gather, module)


def gathered_array(
    partition: Partition | None, array: jax.Array, axes: LogicalAxes, *, name: str
) -> jax.Array:
    """`gathered` for one array whose dimensions have the names `axes`."""
    if partition is None or partition.size("fsdp") == 1 or "embed" not in axes:
        return array
    spec = parameter_spec(partition, axes, array.shape, name=name)
    whole = P(*(None if axis == ("fsdp",) else axis for axis in spec))
    return _gather(partition.sharding(*whole), partition.sharding(*spec), array)


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
