"""The scan of a memory's keys over the chunks of a sequence, by kernels."""

from pallas_kernels.key_scan.api import KEY_SCAN as KEY_SCAN
from pallas_kernels.key_scan.api import key_loops as key_loops
