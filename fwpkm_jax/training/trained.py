"""Which slow weights a run trains: all of them, or those that match patterns; others are frozen."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax

from fwpkm_jax.models.sharding import declarations
from fwpkm_jax.training.state import ROLE, Precision, matching, named_leaves, trained_names


def check_trained(params: Any, patterns: Sequence[str]) -> None:
    """Raises ValueError if a pattern matches no parameter."""
    names = list(named_leaves(params))
    for pattern in patterns:
        if matching(params, pattern):
            continue
        if pattern.startswith(ROLE):
            roles = sorted({declared.role for declared in declarations(params).values()})
            raise ValueError(
                f"optimizer.train: {pattern!r} matches no parameter; the model's roles are "
                f"{', '.join(roles)}."
            )
        raise ValueError(
            f"optimizer.train: {pattern!r} matches no parameter; paths are like {names[0]} and "
            f"{names[-1]}, and .*/memory/.* are those around memories."
        )


def describe_trained(
    params: Any,
    patterns: Sequence[str],
    precision: Precision = "float32",
    *,
    moments: int = 2,
) -> str:
    """How many weights train, the memory and the operations that this saves; "" if all train.

    Operations are those of the linear maps, without what a step recomputes. A frozen map leaves out
    the product behind its gradient, a third of its six operations per token and weight; one that
    lies before all that trains leaves out the whole backward pass.

    Args:
      params: arrays or their shapes.
      patterns: patterns of the paths that train, see `OptimizerConfig.train`.
      precision: dtype of the weights that train, see `OptimizerConfig.precision`.
      moments: numbers that the optimiser keeps per trained weight.
    """
    if not patterns:
        return ""
    total = sum(x.size for x in jax.tree.leaves(params))
    named, names = named_leaves(params), trained_names(params, patterns)
    trained = sum(x.size for name, x in named.items() if name in names)
    # Trained, it would have a gradient and moments, and with the weight all may be float32.
    width = 4 if precision == "float32" else 0
    saved = sum(
        x.size * ((2 + moments) * max(width, x.dtype.itemsize) - x.dtype.itemsize)
        for name, x in named.items()
        if name not in names
    )
    return (
        f"Trains {trained:,} of {total:,} slow weights ({trained / total:.1%}); the others need no "
        f"gradient and no state of the optimiser, which saves {saved / 1e6:,.1f} MB. "
        f"The linear maps take {_saved_operations(params, names):.0%} fewer operations per step."
    )


def _saved_operations(params: Any, trained: frozenset[str]) -> float:
    """The share of a step's operations in linear maps that frozen ones leave out."""
    named, declared = named_leaves(params), declarations(params)
    head = "head" if "head" in named else "embedding"
    first = min(map(_place, trained))
    full = saved = 0
    for name, x in named.items():
        # Not those of experts or of a memory's first weights, which are not applied once per token.
        if name != head and not (declared[name].role == "matrix" and x.ndim == 2):
            continue
        full += 6 * x.size
        if name not in trained:
            place = math.inf if name == head else _place(name)
            saved += (4 if place < first else 2) * x.size
    return saved / full


def _place(name: str) -> float:
    """Where a parameter is first used: -1, the number of its block, or after all of them."""
    if name == "embedding":
        return -1
    found = re.match(r"blocks/(\d+)/", name)
    return int(found[1]) if found else math.inf
