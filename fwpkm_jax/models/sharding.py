"""Which mesh axis splits which dimension of each slow weight.

Every parameter declares its dimensions where it is made (see `layers.parameters`); `mesh_axes` maps
their names to axes of the mesh.
"""

import functools
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fwpkm_jax.layers.parameters import Declaration, LogicalAxes, declaration_of, is_variable
from fwpkm_jax.layers.partition import HEADS, Partition


def path_name(path: Any) -> str:
    """A pytree path in the form `blocks/0/mixer/kernel`, as in errors and checkpoints."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    # A Flax variable is a pytree node with one child; only some versions show the child's key.
    return name.removesuffix("/value")


def beside(weight: nnx.Variable, tree: Any) -> Any:
    """The arrays of a tree, put onto the device that a model's weights were put onto, if it is one.

    Weights from a checkpoint were put onto their device (they are committed), and so is what a
    program returns that takes them. JAX compiles a program again where arguments are put onto a
    device that only lay there by default: a loop over a state that starts like that compiles twice.

    Args:
      weight: one of the model's parameters. If it is of NumPy or no array yet, is traced, lies on
        several devices or was not put anywhere, the tree stays as it is.
      tree: a pytree of arrays; none is copied that lies there already.
    """
    (array,) = jax.tree.leaves(weight)
    if isinstance(array, Tracer) or not isinstance(array, jax.Array) or not array.committed:
        return tree
    return tree if len(array.sharding.device_set) > 1 else jax.device_put(tree, array.sharding)


def mesh_axes(partition: Partition) -> dict[str, tuple[str, ...]]:
    """The mesh axes that split each logical axis; an axis that is not listed is not split."""
    table = partition.memory_axes(learned=True)
    return {
        "embed": ("fsdp",),
        "heads": (HEADS,),
        "mlp": (HEADS,),
        "experts": (HEADS,),
        "slots": table.slots,
        "columns": table.columns,
    }


def declarations(tree: Any) -> dict[str, Declaration]:
    """What each parameter of a tree says about itself, by `path_name`, in the tree's order.

    Raises:
      ValueError: a parameter does not say what it is.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)
    found = {}
    for path, leaf in leaves:
        name, declaration = path_name(path), declaration_of(leaf)
        if declaration is None:
            raise ValueError(
                f"The parameter {name} does not say what it is; make it with "
                "fwpkm_jax.layers.parameter(value, role, axes), or give the Flax layer that makes "
                "it kernel_metadata=declare(role, axes)."
            )
        found[name] = declaration
    return found


def parameter_spec(
    partition: Partition, axes: LogicalAxes, shape: tuple[int, ...], *, name: str
) -> P:
    """The partition spec of a parameter.

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


def parameter_shardings(partition: Partition, params: Any) -> Any:
    """The sharding of every slow weight, in the tree structure of `params`.

    Args:
      params: arrays or their shapes, in Flax variables that say what they are.

    Raises:
      ValueError: a parameter does not say what it is, or does not divide into the mesh's parts.
    """
    leaves, structure = jax.tree.flatten(params)
    shardings = []
    for (name, declaration), leaf in zip(declarations(params).items(), leaves, strict=True):
        axes = declaration.axes_of(leaf.shape, name)
        spec = parameter_spec(partition, axes, leaf.shape, name=name)
        shardings.append(NamedSharding(partition.mesh, spec))
    return jax.tree.unflatten(structure, shardings)


def gathered(partition: Partition, module: Any, name: str) -> Any:
    """A module with the weights that FSDP splits gathered on every device.

    The backward pass splits their gradients again.

    Args:
      partition: of the weights; without parts along `fsdp` the module stays as it is.
      name: its path in the model, for errors.
    """
    if partition.size("fsdp") == 1:
        return module
    leaves, structure = jax.tree.flatten(module)
    whole = []
    for (path, declaration), leaf in zip(declarations(module).items(), leaves, strict=True):
        place = f"{name}/{path}"
        axes = declaration.axes_of(leaf.shape, place)
        whole.append(gathered_array(partition, leaf, axes, name=place))
    return jax.tree.unflatten(structure, whole)


def gathered_array(
    partition: Partition, array: jax.Array, axes: LogicalAxes, *, name: str
) -> jax.Array:
    """`gathered` for one array whose dimensions have the names `axes`."""
    if partition.size("fsdp") == 1 or "embed" not in axes:
        return array
    spec = parameter_spec(partition, axes, array.shape, name=name)
    whole = P(*(None if axis == ("fsdp",) else axis for axis in spec))
    return _gather(partition.sharding(*whole), partition.sharding(*spec), array)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(whole: NamedSharding, split: NamedSharding, weight: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(weight, whole)


def _gather_forward(whole, split, weight):
    return _gather(whole, split, weight), None


def _gather_backward(whole, split, _, gradient):
    return (jax.lax.with_sharding_constraint(gradient, split),)


_gather.defvjp(_gather_forward, _gather_backward)
