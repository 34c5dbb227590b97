"""Runs the properties of a contract; compares pytrees with messages that name the leaf."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LEAST_NORM = 1e-2
"""A smaller norm counts as this: of sums that cancel almost wholly only rounding is left."""

Property = Callable[[Any], None]
"""Checks a case (a subject with its inputs); raises AssertionError if the property is broken."""


def run_properties(
    subject: str, case: Any, known: Mapping[str, Property], chosen: Iterable[str] | None
) -> None:
    """Checks properties in double precision mode and reports all broken ones.

    Args:
      subject: name of what is checked, for the message.
      chosen: names of the properties to check; None: all.

    Raises:
      AssertionError: a property is broken; the message has one line for each of them.
      ValueError: a chosen name is unknown.
    """
    names = list(known) if chosen is None else list(chosen)
    for name in names:
        if name not in known:
            raise ValueError(f"properties: {name!r} is unknown; choose from {sorted(known)}.")
    broken, first = [], None
    for name in names:
        try:
            with jax.enable_x64(True):
                known[name](case)
        except Exception as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            broken.append(f"  {name}: {kind}{str(error).strip() or 'does not hold'}")
            first = first or error
    if broken:
        raise AssertionError(f"{subject} breaks its contract:\n" + "\n".join(broken)) from first


def require(condition: Any, message: str) -> None:
    """Raises AssertionError with `message` unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def require_equal(actual: Any, expected: Any, what: str) -> None:
    """Raises AssertionError unless both pytrees hold equal numbers; NaN equals NaN."""
    require_close(actual, expected, what, rtol=0, atol=0)


def require_close(
    actual: Any, expected: Any, what: str, *, rtol: float = 1e-10, atol: float = 1e-12
) -> None:
    """Raises AssertionError unless both pytrees hold the same numbers up to the tolerances."""
    for name, ours, theirs in _pairs(actual, expected, what):
        same = np.isclose(ours, theirs, rtol=rtol, atol=atol, equal_nan=True)
        if not np.all(same):
            where = tuple(int(i) for i in np.argwhere(~same)[0])
            raise AssertionError(
                f"{name} differs in {np.sum(~same)} of {same.size} numbers; the first, at {where}: "
                f"{ours[where]!r} instead of {theirs[where]!r}"
            )


def require_near(actual: Any, expected: Any, *, what: str, tolerance: float) -> None:
    """Raises AssertionError unless both pytrees differ by at most a share of the expected norm.

    In double precision this holds of each leaf, in single precision of all leaves together: the sum
    of a single leaf may cancel, so that its rounding is large beside it. A norm below 1e-2 counts
    as 1e-2. Leaves of integers must be equal.
    """
    floats = [x for x in jax.tree.leaves(expected) if is_float(x)]
    single = any(x.dtype == jnp.float32 for x in floats)
    everything = float(np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in floats)))
    for name, ours, theirs in _pairs(actual, expected, what):
        if not is_float(ours):
            require(np.array_equal(ours, theirs), f"{name} is {ours}, expected {theirs}")
            continue
        norm = max(everything if single else float(np.linalg.norm(theirs)), _LEAST_NORM)
        apart = float(np.linalg.norm(ours - theirs)) / norm
        require(apart <= tolerance, f"{name} differs by {apart:.1e} of its norm, {norm:.1e}")


def distance(actual: Any, expected: Any) -> float:
    """The norm of the difference of two pytrees, as a share of the expected norm."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    arrays = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    apart, norm = (
        float(np.sqrt(sum(np.sum(np.square(x)) for x in parts)))
        for parts in ([a - b for a, b in arrays], [b for _, b in arrays])
    )
    return apart / max(norm, _LEAST_NORM)


def require_finite(tree: Any, what: str) -> None:
    """Raises AssertionError if a floating-point leaf holds an infinity or NaN."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if is_float(leaf):
            finite = np.isfinite(np.asarray(leaf, np.float64)).all()
            require(finite, f"{what}{jax.tree_util.keystr(path)} is not finite")


def require_same_types(actual: Any, expected: Any, what: str) -> None:
    """Raises AssertionError unless both pytrees have the same structure, shapes and dtypes."""
    for path, ours, theirs in _leaves(actual, expected, what):
        types = [(tuple(x.shape), jnp.dtype(x.dtype).name) for x in (ours, theirs)]
        require(types[0] == types[1], f"{path} is {types[0]}, expected {types[1]}")


def is_float(leaf: Any) -> bool:
    """Whether an array holds floating-point numbers."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def cast_floats(tree: Any, dtype: Any) -> Any:
    """The tree as JAX arrays; floating-point leaves are cast to `dtype`."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype) if is_float(x) else jnp.asarray(x), tree)


def _leaves(actual: Any, expected: Any, what: str) -> Iterator[tuple[str, Any, Any]]:
    """The leaves of both trees with their names; raises AssertionError if structures differ."""
    structures = jax.tree.structure(actual), jax.tree.structure(expected)
    require(
        structures[0] == structures[1],
        f"{what} has the structure {structures[0]}, expected {structures[1]}",
    )
    leaves = jax.tree_util.tree_leaves_with_path(actual)
    for (path, ours), theirs in zip(leaves, jax.tree.leaves(expected), strict=True):
        yield f"{what}{jax.tree_util.keystr(path)}", ours, theirs


def _pairs(actual: Any, expected: Any, what: str) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The same as NumPy arrays of one shape, floating-point numbers in float64."""
    for name, ours, theirs in _leaves(actual, expected, what):
        if ours.dtype == jax.dtypes.float0:
            continue
        require(
            ours.shape == theirs.shape, f"{name} has the shape {ours.shape}, not {theirs.shape}"
        )
        dtype = np.float64 if is_float(ours) else None
        yield name, np.asarray(ours, dtype), np.asarray(theirs, dtype)
