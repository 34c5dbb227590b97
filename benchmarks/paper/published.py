"""Sizes and speeds that the FwPKM paper (arXiv:2601.00671) reports in Table 1."""

from __future__ import annotations

from typing import NamedTuple

from fwpkm_jax.paper.models import TABLE_1

TOKENS_PER_STEP = 8 * 4096
"""Tokens of the steps that the paper profiled: 8 sequences of 4,096."""


class Published(NamedTuple):
    """A row of the table."""

    total: float
    """Parameters in millions, fast weights included."""
    active: float
    """Parameters in millions that one token uses."""
    flops: float
    """Floating-point operations of a training step, in 10^12."""
    samples_per_second: float
    """Sequences per second in training, on one H100."""


_ROWS = (
    Published(112.11, 112.11, 22.04, 54.44),
    Published(509.08, 106.62, 20.92, 42.90),
    Published(519.12, 116.48, 22.74, 19.04),
    Published(515.77, 113.19, 22.14, 21.27),
    Published(112.65, 112.65, 22.15, 54.58),
    Published(509.61, 107.15, 21.03, 41.63),
    Published(519.66, 117.02, 22.85, 18.10),
    Published(516.31, 113.73, 22.24, 21.06),
    Published(112.65, 112.65, 22.16, 53.33),
    Published(509.61, 107.15, 21.04, 39.07),
    Published(519.66, 117.02, 22.86, 18.16),
    Published(516.31, 113.73, 22.25, 20.74),
    Published(114.25, 114.25, 22.51, 56.42),
    Published(511.22, 108.76, 21.39, 39.79),
    Published(521.26, 118.62, 23.21, 18.73),
    Published(517.91, 115.33, 22.60, 21.87),
    Published(118.05, 118.05, 23.21, 46.21),
    Published(118.58, 118.58, 23.31, 44.06),
    Published(118.58, 118.58, 23.32, 33.33),
    Published(120.19, 120.19, 23.67, 40.16),
    Published(112.70, 112.70, 24.44, 30.24),
)

PUBLISHED: dict[str, Published] = dict(zip(TABLE_1, _ROWS, strict=True))
"""The table's rows by the names of `fwpkm_jax.paper.models`."""
