"""What kernels do not take, in the words of messages."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Kernel

LANES = 128
"""Number of lanes (TPU) or threads (GPU) that move a row together."""

FLOATS = (jnp.float32, jnp.bfloat16)
"""Dtypes of activations that the kernels take."""


def refusal(*cases: tuple[bool, str]) -> str | None:
    """The words of the first case that is true, or None."""
    return next((words for refused, words in cases if refused), None)


def ragged(width: int, widest: int, *, of: str) -> tuple[bool, str]:
    """Whether no kernel takes rows of so many values, and why; a case of `refusal`."""
    refused = width % LANES > 0 or not 0 < width <= widest
    return refused, f"rows of {width} {of}, only multiples of {LANES} up to {widest}"


def refuse_rows(kernel: Kernel, values: jax.Array, *others: jax.Array | None) -> str | None:
    """None, or why no kernel takes the table `values` together with these arrays."""
    wrong = {str(x.dtype) for x in others if x is not None} - {"float32"}
    width = values.shape[-1]
    # In a TPU's bfloat16 table two neighbouring rows share 32-bit words of a tile.
    dtypes = (jnp.float32, jnp.bfloat16) if kernel == "gpu" else (jnp.float32,)
    # Only devices need whole rows; interpreted kernels run at the widths of small tests.
    ragged = width % LANES > 0 and not dispatch.interpreted()
    return refusal(
        (values.dtype not in dtypes, f"{values.dtype} tables"),
        (bool(wrong), f"{' and '.join(sorted(wrong))} arrays beside the table"),
        (ragged, f"rows of {width} values, only multiples of {LANES}"),
    )
