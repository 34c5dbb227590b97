"""Which slow weights a run trains: all of them, or those that patterns name; the rest is frozen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax

from fwpkm_jax.training.state import is_trained, named_leaves


def check_trained(params: Any, patterns: Sequence[str]) -> None:
    """Raises ValueError where a pattern names no parameter."""
    names = list(named_leaves(params))
    for pattern in patterns:
        if not any(re.fullmatch(pattern, name) for name in names):
            raise ValueError(
                f"optimizer.train: {pattern!r} matches no parameter; paths are like {names[0]} and "
                f"{names[-1]}, and .*/memory/.* are those around memories."
            )


def describe_trained(params: Any, patterns: Sequence[str]) -> str:
    """A sentence on what trains and what that saves; "" where everything does.

    Args:
      params: arrays or their shapes.
      patterns: of the paths that train.
    """
    if not patterns:
        return ""
    total = sum(x.size for x in jax.tree.leaves(params))
    named = named_leaves(params)
    trained = sum(x.size for name, x in named.items() if is_trained(name, patterns))
    # A gradient and two moments of each parameter.
    saved = 3 * sum(
        x.size * x.dtype.itemsize for name, x in named.items() if not is_trained(name, patterns)
    )
    return (
        f"Trains {trained:,} of {total:,} slow weights ({trained / total:.1%}); the others need no "
        f"gradient and no state of the optimiser, which saves {saved / 1e6:,.1f} MB."
    )
