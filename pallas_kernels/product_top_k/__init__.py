"""Product-key addressing in one operation: scores, the best sub-keys and their best pairs."""

from pallas_kernels.product_top_k.api import Selection as Selection
from pallas_kernels.product_top_k.api import choose_sub_keys as choose_sub_keys
from pallas_kernels.product_top_k.api import pair_sub_keys as pair_sub_keys
from pallas_kernels.product_top_k.api import select_slots as select_slots
