"""Rows of a table read at the slots of each token: weighted sums, and inner products."""

from pallas_kernels.slot_read.api import SlotRead as SlotRead
from pallas_kernels.slot_read.api import slot_dot as slot_dot
from pallas_kernels.slot_read.api import slot_read as slot_read
