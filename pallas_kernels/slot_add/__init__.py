"""Writes rows of a table: adds multiples of each token's vector to the slots that it reads."""

from pallas_kernels.slot_add.api import SlotAdd as SlotAdd
from pallas_kernels.slot_add.api import slot_add as slot_add
