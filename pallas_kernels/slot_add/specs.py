"""The shapes of `slot_read.specs`, with the arguments of `slot_add`."""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from fwpkm_jax.core.slots.values.grouping import SlotGroups, group_slots
from pallas_kernels.dispatch import Kernel
from pallas_kernels.slot_add.api import SlotAdd, slot_add
from pallas_kernels.slot_read import specs as slot_read_specs
from pallas_kernels.slot_read.specs import CHECK_RATIOS, CHECKED, RowSpec
from pallas_kernels.slot_read.specs import SPECS as SPECS
from pallas_kernels.spec import Comparison


def sample(spec: RowSpec, dtype: DTypeLike) -> dict[str, Any]:
    """The arguments of one `slot_add`."""
    arrays = slot_read_specs.sample(spec, dtype)
    return {
        "values": arrays["values"],
        "groups": group_slots(arrays["slot_ids"], num_slots=spec.slots),
        "coefficients": arrays["weights"] - 0.5,
        "rows": arrays["target"],
    }


def call(spec: RowSpec, dtype: DTypeLike, *, groups: SlotGroups, **arrays: Any) -> SlotAdd:
    """`slot_add` with the old rows; the undefined rows after the last group are set to zero."""
    del spec, dtype
    values, old_rows = slot_add(groups=groups, **arrays, with_old_rows=True)
    specified = jnp.arange(old_rows.shape[0]) < groups.num_groups
    return SlotAdd(values, jnp.where(specified[:, None], old_rows, 0.0))


COMPARISON = Comparison(specs=SPECS, sample=sample, call=call, checked=CHECKED, ratios=CHECK_RATIOS)


def check(_: Kernel) -> None:
    """Raises AssertionError if this device's kernels differ from plain JAX."""
    COMPARISON.check()
