"""Reads the rows of a table that each token addresses: weighted sums and inner products."""

from pallas_kernels.slot_read.api import SlotRead as SlotRead
from pallas_kernels.slot_read.api import slot_dot as slot_dot
from pallas_kernels.slot_read.api import slot_read as slot_read
