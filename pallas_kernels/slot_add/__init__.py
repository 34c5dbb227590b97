"""Rows of a table written: multiples of the tokens' vectors added to the slots that they read."""

from pallas_kernels.slot_add.api import SlotAdd as SlotAdd
from pallas_kernels.slot_add.api import slot_add as slot_add
