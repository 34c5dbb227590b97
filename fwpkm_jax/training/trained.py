"""Which slow weights a run trains: all of them, or those that match patterns; others are frozen."""

from __future__ import annotations

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
    """A sentence on how many weights train and the memory that this saves; "" if all train.

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
        f"gradient and no state of the optimiser, which saves {saved / 1e6:,.1f} MB."
    )
