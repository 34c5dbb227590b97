"""The shapes of `slot_read.specs`, with what a write takes."""

from typing import Any

import jax
from jax.typing import DTypeLike

from fwpkm_jax.core.slots.grouping import group_slots
from pallas_kernels.slot_read import specs as slot_read_specs
from pallas_kernels.slot_read.specs import CHECK_RATIO as CHECK_RATIO
from pallas_kernels.slot_read.specs import CHECKED as CHECKED
from pallas_kernels.slot_read.specs import SPECS as SPECS
from pallas_kernels.slot_read.specs import RowSpec


def sample(spec: RowSpec, dtype: DTypeLike) -> dict[str, Any]:
    """The arrays of one `slot_add`."""
    arrays = slot_read_specs.sample(spec, dtype)
    return {
        "values": arrays["values"],
        "groups": group_slots(arrays["slot_ids"], num_slots=spec.slots),
        "coefficients": arrays["weights"] - 0.5,
        "rows": arrays["target"],
    }


def sample_write(spec: RowSpec, dtype: DTypeLike) -> dict[str, jax.Array]:
    """The arrays of one `slot_write`; a few tokens do not count."""
    arrays = slot_read_specs.sample(spec, dtype)
    return {
        "values": arrays["values"],
        "slot_ids": arrays["slot_ids"],
        "weights": arrays["weights"],
        "errors": arrays["target"],
        "counted": (arrays["write_weight"] < 0.8).astype(dtype),
    }
