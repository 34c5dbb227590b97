"""The shapes of `slot_read.specs`, with the arguments of `slot_add`."""

from typing import Any

from jax.typing import DTypeLike

from fwpkm_jax.core.slots.values.grouping import group_slots
from pallas_kernels.slot_read import specs as slot_read_specs
from pallas_kernels.slot_read.specs import CHECK_RATIO as CHECK_RATIO
from pallas_kernels.slot_read.specs import CHECKED as CHECKED
from pallas_kernels.slot_read.specs import SPECS as SPECS
from pallas_kernels.slot_read.specs import RowSpec


def sample(spec: RowSpec, dtype: DTypeLike) -> dict[str, Any]:
    """The arguments of one `slot_add`."""
    arrays = slot_read_specs.sample(spec, dtype)
    return {
        "values": arrays["values"],
        "groups": group_slots(arrays["slot_ids"], num_slots=spec.slots),
        "coefficients": arrays["weights"] - 0.5,
        "rows": arrays["target"],
    }
