"""Which slow weights a run trains: all of them, or those that match patterns; others are frozen."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax

from fwpkm_jax.training.state import is_trained, named_leaves


def check_trained(params: Any, patterns: Sequence[str]) -> None:
    """Raises ValueError if a pattern matches no parameter."""
    names = list(named_leaves(params))
    for pattern in patterns:
        if not any(re.fullmatch(pattern, name) for name in names):
            raise ValueError(
                f"optimizer.train: {pattern!r} matches no parameter; paths are like {names[0]} and "
                f"{names[-1]}, and .*/memory/.* are those around memories."
            )


def describe_trained(params: Any, patterns: Sequence[str]) -> str:
    """How many weights train, the memory and the operations that this saves; "" if all train.

    Operations are those of the linear maps, without what a step recomputes. A frozen map leaves out
    the product behind its gradient, a third of its six operations per token and weight; one that
    lies before all that trains leaves out the whole backward pass.

    Args:
      params: arrays or their shapes.
      patterns: patterns of the paths that train, see `OptimizerConfig.train`.
    """
    if not patterns:
        return ""
    total = sum(x.size for x in jax.tree.leaves(params))
    named = named_leaves(params)
    trained = sum(x.size for name, x in named.items() if is_trained(name, patterns))
    # AdamW needs a gradient and two moments for each trained parameter.
    saved = 3 * sum(
        x.size * x.dtype.itemsize for name, x in named.items() if not is_trained(name, patterns)
    )
    return (
        f"Trains {trained:,} of {total:,} slow weights ({trained / total:.1%}); the others need no "
        f"gradient and no state of the optimiser, which saves {saved / 1e6:,.1f} MB. "
        f"The linear maps take {_saved_operations(named, patterns):.0%} fewer operations per step."
    )


def _saved_operations(named: dict[str, Any], patterns: Sequence[str]) -> float:
    """The share of a step's operations in linear maps that frozen ones leave out."""
    head = "head" if "head" in named else "embedding"
    first = min(_place(name) for name in named if is_trained(name, patterns))
    full = saved = 0
    for name, x in named.items():
        if name != head and not (name.endswith("/kernel") and x.ndim == 2):
            continue
        full += 6 * x.size
        if not is_trained(name, patterns):
            place = math.inf if name == head else _place(name)
            saved += (4 if place < first else 2) * x.size
    return saved / full


def _place(name: str) -> float:
    """Where a parameter is first used: -1, the number of its block, or after all of them."""
    if name == "embedding":
        return -1
    found = re.match(r"blocks/(\d+)/", name)
    return int(found[1]) if found else math.inf
