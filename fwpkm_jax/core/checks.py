"""Checks of arguments: a wrong one raises one line that says what was found and what is expected.

They run while a function is traced and cost no time in the compiled program.
"""

from typing import Any

import jax
import jax.numpy as jnp

_KINDS = {
    "float": (jnp.floating, "floats; convert it, as {name}.astype(jnp.float32)"),
    "int": (jnp.integer, "integers; convert it, as {name}.astype(jnp.int32)"),
    "mask": (jnp.number, "numbers or bools"),
}


def check_rngs(rngs: Any) -> None:
    """Raises ValueError unless `rngs` gives random keys for parameters, as `nnx.Rngs` does."""
    if not hasattr(rngs, "params"):
        raise ValueError(
            f"rngs is {_shown(rngs)}; expected random streams, as nnx.Rngs(0) of flax.nnx."
        )


def check_key(rng: Any) -> None:
    """Raises ValueError unless `rng` is a random key."""
    dtype = getattr(rng, "dtype", None)
    is_key = dtype is not None and (
        jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == jnp.uint32 and rng.ndim == 1)
    )
    if not is_key:
        raise ValueError(f"rng is {_shown(rng)}; expected a random key, as jax.random.key(0).")


def _shown(x: Any) -> str:
    return _describe(x) if hasattr(x, "dtype") else f"{x!r:.40} ({type(x).__name__})"


def check_arrays(
    *, sizes: dict[str, int] | None = None, **arguments: tuple[Any, str]
) -> dict[str, int]:
    """Checks the dtypes and shapes of several arguments against each other.

    Args:
      sizes: sizes of axes that are known in advance, by the name of the axis.
      **arguments: for each argument the array, or None to skip it, and what it should be:
        `float`, `int` or `mask` (numbers or bools) and the names of its axes, as
        `"float batch length model"`. Axes of one name have one size; no axis may be empty.

    Returns:
      The size of every named axis.

    Raises:
      ValueError: an argument does not fit; the message names the first such argument.

    Example:
      >>> x, mask = jnp.zeros((2, 8, 16)), jnp.ones((2, 7))
      >>> check_arrays(x=(x, "float batch length model"), mask=(mask, "mask batch length"))
      Traceback (most recent call last):
      ValueError: mask is float32[2, 7]; expected [batch=2, length=8].
    """
    known = dict(sizes or {})
    for name, (x, description) in arguments.items():
        if x is not None:
            kind, *axes = description.split()
            if not _fits(x, kind, axes, known):
                raise ValueError(_fault(name, x, kind, axes, known))
            # The first array that names an axis fixes its size for the others.
            known |= zip(axes, x.shape, strict=True)
    return known


def check_tree(name: str, tree: Any, expected: Any, *, leading: tuple[str, ...] = ()) -> None:
    """Checks that a pytree has the structure and the shapes of another, behind leading axes.

    Args:
      name: what messages call it.
      tree: the argument. What has a shape and a dtype counts as an array, whatever it consists of.
      expected: arrays or `jax.ShapeDtypeStruct`.
      leading: names of the axes before those of `expected`; the first leaf gives their sizes.

    Raises:
      ValueError: a leaf is missing or unexpected, or has another shape or no floating dtype.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: hasattr(x, "dtype")
    )
    wanted, wanted_structure = jax.tree_util.tree_flatten_with_path(expected)
    if structure != wanted_structure:
        raise ValueError(
            f"{name} is {_layout(found)}; expected {_layout(wanted)}. Make it by the same "
            "configuration that reads it."
        )
    sizes: dict[str, int] = {}
    for (path, leaf), (_, like) in zip(found, wanted, strict=True):
        axes = [*leading, *(str(size) for size in like.shape)]
        known = sizes | {str(size): size for size in like.shape}
        # The message is made only for a fault: a model checks many leaves while it is traced.
        if not _fits(leaf, "float", axes, known):
            raise ValueError(_fault_of_leaf(name, path, leaf, like, axes, known))
        sizes |= zip(leading, leaf.shape, strict=False)


def _fault_of_leaf(
    name: str, path: Any, leaf: Any, like: Any, axes: list[str], sizes: dict[str, int]
) -> str:
    """What to say of a leaf of the tree `name` that `_fits` does not accept."""
    part = f"{name}{jax.tree_util.keystr(path)}"
    groups = axes[: len(axes) - len(like.shape)]
    found = f"{part} is {_describe(leaf)}; expected [{', '.join(axes)}]"
    if groups and leaf.shape == like.shape:
        return (
            f"{found}: the axis of {groups[0]} is missing, add it as "
            f"jax.tree.map(lambda x: x[None], {name})."
        )
    if not groups and leaf.shape and leaf.shape[1:] == like.shape:
        return (
            f"{found}: take one group, as jax.tree.map(lambda x: x[0], {name}), or call run_groups."
        )
    return _fault(part, leaf, "float", axes, sizes)


def _fits(x: Any, kind: str, axes: list[str], sizes: dict[str, int]) -> bool:
    """Whether an array has this kind of dtype and these axes; decides without a message."""
    if not hasattr(x, "dtype") or len(x.shape) != len(axes):
        return False
    if not jnp.issubdtype(x.dtype, _KINDS[kind][0]) and not (kind == "mask" and x.dtype == bool):
        return False
    for axis, size in zip(axes, x.shape, strict=True):
        # An axis of no entries is right only where it is known to be empty.
        if sizes.get(axis, size or None) != size:
            return False
    return True


def _fault(name: str, x: Any, kind: str, axes: list[str], sizes: dict[str, int]) -> str:
    """What to say of an argument that `_fits` does not accept."""
    expected = f"[{', '.join(_axis(axis, sizes) for axis in axes)}]"
    if not hasattr(x, "dtype"):
        return f"{name} is a {type(x).__name__}; expected an array {expected}."
    shape = x.shape
    found = f"{name} is {_describe(x)}; expected {expected}"
    if len(shape) != len(axes):
        hint = f"give it {len(axes)}"
        if len(shape) == len(axes) - 1:
            hint = f"add one, as {_with_axis(name, shape, axes, sizes)}"
        return f"{found}: the number of axes is {len(shape)}; {hint}."
    dtype, way_out = _KINDS[kind]
    if not jnp.issubdtype(x.dtype, dtype) and not (kind == "mask" and x.dtype == bool):
        return f"{found} of {way_out.format(name=name)}."
    if any(sizes.get(axis, size) != size for axis, size in zip(axes, shape, strict=True)):
        return f"{found}."
    empty = next(
        axis for axis, size in zip(axes, shape, strict=True) if size == 0 and sizes.get(axis) != 0
    )
    return f"{found}: {empty} is 0; give at least one."


def _with_axis(name: str, shape: tuple[int, ...], axes: list[str], sizes: dict[str, int]) -> str:
    """The array with the axis that is missing: the first that all others fit without.

    While their number is unknown, the axis of heads is named as well if it may be the missing one:
    those who have a single head leave it out.
    """
    places = []
    for place, missing in enumerate(axes):
        others = axes[:place] + axes[place + 1 :]
        fits = all(sizes.get(axis, size) == size for axis, size in zip(others, shape, strict=True))
        # The axis that would be added has one entry.
        if fits and sizes.get(missing, 1) == 1:
            places.append(place)
    first, *more = places or [0]
    heads = [place for place in more if axes[place] == "heads" and "heads" not in sizes]
    if not heads:
        return f"{name}[{':, ' * first}None]"
    return " or ".join(f"{name}[{':, ' * at}None] for {axes[at]}" for at in (first, *heads))


def _axis(axis: str, sizes: dict[str, int]) -> str:
    return axis if axis.isdigit() or axis not in sizes else f"{axis}={sizes[axis]}"


def _describe(x: Any) -> str:
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]"


def _layout(leaves: list[tuple[Any, Any]]) -> str:
    parts = [f"{jax.tree_util.keystr(path)} {list(jnp.shape(leaf))}" for path, leaf in leaves]
    return f"a tree of {', '.join(parts)}" if parts else "empty"
