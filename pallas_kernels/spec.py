"""Named shapes of an operation, and the comparison of its kernels with plain JAX on them.

Each operation's `specs.py` has a subclass of `Spec` with its sizes, a list `SPECS`, a function
`sample(spec, dtype) -> dict` that draws the arguments of the public function, and a `COMPARISON`,
whose `check` runs before the first use of a device's kernels.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.checks import require, result_errors
from pallas_kernels.dispatch import Implementation

LIBRARY_RATIOS = {"bfloat16": 2e-2}
"""Largest differences of another package's kernels, relative to an array's norm: they round to
bfloat16 between their stages, too."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Named sizes of one call, shared by parity tests, ahead-of-time compiles and benchmarks."""

    name: str
    small: bool = True
    """Whether a CPU interprets it in about a second; other specs are tested on the device."""
    compiled: bool = False
    """Whether tests compile it ahead of time for every device; True for the paper's widths."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How an operation's kernels are compared with its definition in plain JAX."""

    specs: Sequence[Any]
    sample: Callable[[Any, DTypeLike], dict[str, Any]]
    """`sample(spec, dtype)`: the arrays of one call by name."""
    call: Callable[..., Any]
    """`call(spec, dtype, backend=..., **arrays)`: the operation's results."""
    checked: Sequence[str]
    """Names of the specs that are compared on a device before the first use there."""
    ratios: Mapping[str, float]
    """Largest differences allowed there, relative to an array's norm, by dtype."""
    fixed: Sequence[str] = ()
    """Names of float arrays without cotangents."""

    def named(self, name: str) -> Any:
        """The spec of this name."""
        return next(spec for spec in self.specs if spec.name == name)

    def errors(self, spec: Any, dtype: DTypeLike) -> dict[str, float]:
        """Differences of results and cotangents, relative to each array's norm."""
        op = functools.partial(self.call, spec, jnp.dtype(dtype))
        return result_errors(op, self.sample(spec, jnp.dtype(dtype)), fixed=self.fixed)

    def check(self, _kernel: Implementation) -> None:
        """Runs this device's kernels; raises AssertionError if they differ from plain JAX."""
        for name in self.checked:
            for dtype, ratio in self.ratios.items():
                require(self.errors(self.named(name), dtype), ratio, f"{name}, {dtype}")
