"""Matrix memories in chunks: plain JAX, or the kernels of other packages."""

from pallas_kernels.recurrence.api import linear_recurrence as linear_recurrence
