"""Reference vectors on disk: reading one file, how exact it is, and the comparison it calls for.

A file is an `.npz` whose entry `config` is a JSON string of scalar settings and whose other
entries are arrays. A README.md beside the files states, file by file, how closely a float32
implementation can follow.
"""

import functools
import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

# Where a file has no entry in its README (or there is no README): what a plain float32
# implementation reaches on arrays of these sizes, with room for gradients through many steps.
UNSTATED_FLOAT32_OUTPUT_RTOL = 2e-5
UNSTATED_FLOAT32_GRADIENT_RTOL = 1e-3


class Vectors(NamedTuple):
    """One file: its settings and its arrays by name."""

    config: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Tolerance(NamedTuple):
    """`max|actual - expected| <= rtol * max|expected| + atol`, over one whole array."""

    rtol: float
    atol: float


class Float32Errors(NamedTuple):
    """What a README says about one file: rtol of most arrays, and of the named ones."""

    rtol: float
    exceptions: dict[str, float]


def load(path: Path) -> Vectors:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    config = json.loads(arrays.pop("config").item())
    return Vectors(config, arrays)


def config_values(
    path: Path, config: dict[str, Any], *, required: Iterable[str], known: dict[str, Any]
) -> dict[str, Any]:
    """The settings of a file, after checking that the test understands every one of them.

    Args:
      path: the file, for the message.
      config: its settings.
      required: settings the test reads, whatever their value.
      known: settings the test supports at the listed value only.

    Raises:
      ValueError: a setting is missing, or is one that the test would ignore.
    """
    missing = set(required) - set(config)
    unknown = {
        name: value
        for name, value in config.items()
        if name not in set(required) and not (name in known and known[name] == value)
    }
    if missing or unknown:
        raise ValueError(
            f"{path.name}: settings missing: {sorted(missing)}, not understood: {unknown}; "
            "teach the test about them."
        )
    return config


def is_gradient(name: str) -> bool:
    return name.startswith(("d_", "d:"))


@functools.cache
def _float32_errors(readme: Path) -> dict[str, Float32Errors]:
    """File name to the float32 error that the README states under `### <file name>`."""
    if not readme.is_file():
        return {}
    number = r"\d[\d.]*(?:e[+-]?\d+)?"
    errors = {}
    for section in re.split(r"^### ", readme.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        name, _, body = section.partition("\n")
        body = re.split(r"^#+ ", body, flags=re.MULTILINE)[0]
        statement = re.search(
            rf"Float32 rtol ({number}?)(?:, except ((?:`[^`]+` {number}(?:, )?)+))?\.(?:\s|$)", body
        )
        if statement is None:
            continue
        listed = re.findall(rf"`([^`]+)` ({number}?)(?=, |$)", statement[2] or "")
        errors[name.strip()] = Float32Errors(
            float(statement[1]), {array: float(rtol) for array, rtol in listed}
        )
    return errors


def tolerance(path: Path, name: str, dtype: DTypeLike) -> Tolerance:
    """How far array `name` of the file may be from an implementation that computes in `dtype`."""
    if np.dtype(dtype) == np.float64:
        return Tolerance(1e-8 if is_gradient(name) else 1e-9, 1e-11)
    if np.dtype(dtype) != np.float32:
        raise ValueError(f"no tolerance is known for dtype={dtype}; use float32 or float64.")
    stated = _float32_errors(path.parent / "README.md").get(path.name)
    if stated is not None:
        return Tolerance(stated.exceptions.get(name, stated.rtol), 1e-6)
    if is_gradient(name):
        return Tolerance(UNSTATED_FLOAT32_GRADIENT_RTOL, 1e-6)
    return Tolerance(UNSTATED_FLOAT32_OUTPUT_RTOL, 1e-6)


def assert_matches(
    name: str, actual: ArrayLike, expected: np.ndarray, path: Path, dtype: DTypeLike
) -> None:
    """Raises unless `actual` is array `name` of the file; integers must be equal."""
    actual = np.asarray(actual)
    label = f"{path.name}: `{name}` ({np.dtype(dtype).name})"
    assert actual.shape == expected.shape, f"{label}: shape {actual.shape}, not {expected.shape}"
    if not np.issubdtype(expected.dtype, np.floating):
        wrong = int(np.sum(actual != expected))
        assert wrong == 0, f"{label}: {wrong} of {expected.size} integers differ"
        return
    assert actual.dtype == np.dtype(dtype), f"{label}: computed in {actual.dtype}"
    assert np.all(np.isfinite(actual)), f"{label}: not finite"
    rtol, atol = tolerance(path, name, dtype)
    error = np.max(np.abs(actual.astype(np.float64) - expected), initial=0.0)
    size = np.max(np.abs(expected), initial=0.0)
    assert error <= rtol * size + atol, (
        f"{label}: max|difference| {error:.3e} of max|expected| {size:.3e} "
        f"exceeds rtol {rtol:.1e}, atol {atol:.1e}"
    )


class VectorFile(NamedTuple):
    """A file opened for one dtype: floating inputs in it, outputs as they are stored."""

    path: Path
    dtype: np.dtype
    config: dict[str, Any]
    arrays: dict[str, Any]
    expected: dict[str, np.ndarray]

    def assert_matches(self, results: dict[str, ArrayLike]) -> None:
        """Raises unless every output of the file is among `results`, and equal."""
        missing = set(self.expected) - set(results)
        assert not missing, f"{self.path.name}: outputs not computed: {sorted(missing)}"
        failures = []
        for name, expected in self.expected.items():
            try:
                assert_matches(name, results[name], expected, self.path, self.dtype)
            except AssertionError as failure:
                failures.append(str(failure))
        assert not failures, "\n".join(failures)


def open_file(path: Path, dtype: np.dtype) -> VectorFile:
    """The file, its outputs told from its inputs by their dtype (float64 or integer)."""
    config, arrays = load(path)
    inputs, expected = {}, {}
    for name, x in arrays.items():
        if np.issubdtype(x.dtype, np.integer):
            inputs[name] = x
            if name != "tokens":
                expected[name] = x
        elif x.dtype == np.float64:
            expected[name] = x
            inputs[name] = x
        else:
            inputs[name] = jnp.asarray(x, dtype)
    return VectorFile(path, dtype, config, inputs, expected)


def assert_all_match(
    results: Mapping[str, ArrayLike],
    arrays: Mapping[str, np.ndarray],
    *,
    inputs: Collection[str],
    path: Path,
    dtype: DTypeLike,
) -> None:
    """Compares every output stored in a file; an array that nothing computes is a failure.

    Args:
      results: what was computed, by the file's names.
      arrays: the file's arrays.
      inputs: names that are inputs; so are names that begin with `w:` (parameters).
      path: the file.
      dtype: what `results` were computed in.
    """
    outputs = [name for name in arrays if name not in inputs and not name.startswith("w:")]
    unchecked = set(outputs) - set(results)
    assert outputs, f"{path.name} holds no outputs"
    assert not unchecked, f"{path.name}: nothing computes {sorted(unchecked)}"
    for name in outputs:
        assert_matches(name, results[name], arrays[name], path, dtype)
