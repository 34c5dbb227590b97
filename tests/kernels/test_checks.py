"""The checks before a kernel's first use, which pass where the kernel is right."""

import pytest

from pallas_kernels import dispatch
from pallas_kernels.gated_delta.api import check_rule
from pallas_kernels.product_top_k.api import check_selection
from pallas_kernels.row_ops import check_rows


@pytest.mark.slow
@pytest.mark.parametrize("check", [check_selection, check_rows, check_rule])
def test_right_kernels_pass_at_the_widths_of_the_check(check):
    with dispatch.interpret_kernels("tpu"):
        check("tpu")
