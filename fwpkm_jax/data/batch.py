"""What a batch is, and which can be made."""

from collections.abc import Sequence

import numpy as np

Example = dict[str, np.ndarray]
Batch = dict[str, np.ndarray]


def check_batching(*, batch_size: int, rows: Sequence[int] | None) -> None:
    """Raises ValueError unless batches of this size, or these rows of them, can be made."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be 1 or more.")
    if rows is not None and (
        not rows or list(rows) != sorted(set(rows)) or not 0 <= rows[0] <= rows[-1] < batch_size
    ):
        raise ValueError(
            f"rows={rows} must be some of the rows 0 to {batch_size - 1} of a batch, each once and "
            "in order."
        )
