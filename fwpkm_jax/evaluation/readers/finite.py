"""Ends an evaluation where log probabilities are not finite; its numbers would mean nothing."""

import jax
import jax.numpy as jnp
import numpy as np

NONE = -1
"""In place of a token where there is no likeliest one."""


def likeliest(logits: jax.Array) -> jax.Array:
    """The most likely token of logits `[..., vocab]`; `NONE` if a log probability is not finite.

    Of logits that are not finite `argmax` gives a token, too: the first NaN.
    """
    total = jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(jnp.isfinite(total), jnp.argmax(logits, axis=-1), NONE)


def require_finite(losses: np.ndarray, *, where: str) -> np.ndarray:
    """The losses, or a ValueError if one is not finite."""
    bad = int(np.size(losses) - np.count_nonzero(np.isfinite(losses)))
    if bad:
        raise not_finite(where, f"{bad:,} of {np.size(losses):,} log probabilities are")
    return losses


def not_finite(where: str, what: str = "a log probability is") -> ValueError:
    """The error of an evaluation whose numbers would mean nothing."""
    return ValueError(
        f"{where}: {what} not finite. The run's weights or fast weights hold NaN or infinity, or "
        "grew too large; evaluate an earlier checkpoint (--step)."
    )
