"""Which slow weights a run trains: all of them, or those that match patterns; others are frozen."""

from collections.abc import Sequence
from typing import Any

from fwpkm_jax.models.sharding import declarations
from fwpkm_jax.training.state import ROLE, matching, named_leaves, trained_names


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


def describe_trained(params: Any, patterns: Sequence[str]) -> str:
    """How many weights train, of how many; "" without patterns, when all train."""
    if not patterns:
        return ""
    names = trained_names(params, patterns)
    sizes = {name: x.size for name, x in named_leaves(params).items()}
    trained, total = sum(sizes[name] for name in names), sum(sizes.values())
    return (
        f"Trains {trained:,} of {total:,} slow weights ({trained / total:.1%}); the others need no "
        "gradient and no state of the optimiser."
    )
