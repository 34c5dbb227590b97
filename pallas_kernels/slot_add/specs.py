"""The shapes of `slot_read.specs`, with the arguments of `slot_add`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fwpkm_jax.core.slots.values.exchange import ChunkRows, RowOps
from fwpkm_jax.core.slots.values.grouping import SlotGroups, group_slots, reference_counts
from fwpkm_jax.core.slots.values.scan import value_scan
from fwpkm_jax.core.slots.write import PLAIN, ValueWrite
from pallas_kernels.checks import relative_errors, require
from pallas_kernels.dispatch import Kernel
from pallas_kernels.row_ops import row_ops
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
    values, old_rows = slot_add(groups=groups, **arrays, with_old_rows=True)
    specified = jnp.arange(old_rows.shape[0]) < groups.num_groups
    return SlotAdd(values, jnp.where(specified[:, None], old_rows, 0.0))


COMPARISON = Comparison(specs=SPECS, sample=sample, call=call, checked=CHECKED, ratios=CHECK_RATIOS)


def check_scan(kernel: Kernel) -> None:
    """Raises AssertionError if a kernel of `row_ops` differs from plain XLA on this device."""
    for comparison in (slot_read_specs.READS, slot_read_specs.DOTS, COMPARISON):
        comparison.check(kernel)
    for name in CHECKED:
        errors = exchange_errors(slot_read_specs.READS.named(name), kernel)
        require(errors, CHECK_RATIOS["float32"], name)


def exchange_errors(spec: RowSpec, kernel: Kernel) -> dict[str, float]:
    """Differences of a kernel's exchange and of its way back from plain XLA, by name.

    Two chunks that read the same slots in another order, so that the second one's cotangents are
    those from which the first one's begin.
    """
    arrays = slot_read_specs.sample(spec, jnp.float32)
    slot_ids = jnp.stack([arrays["slot_ids"], arrays["slot_ids"][::-1]])
    groups = jax.vmap(functools.partial(group_slots, num_slots=spec.slots))(slot_ids)
    weights = jnp.stack([arrays["weights"], arrays["weights"]]) / spec.places
    counts = jax.vmap(reference_counts)(groups, jnp.ones(slot_ids.shape[:2]))
    rows = ChunkRows(
        weights=weights,
        steps=ValueWrite(step_size=float(spec.places)).steps(weights, counts),
        targets=jnp.stack([arrays["target"], 3.0 * arrays["target"]]),
        error_weights=jnp.stack([arrays["write_weight"], 0.5 * arrays["write_weight"]]),
    )

    @functools.partial(jax.jit, static_argnums=0)
    def results(ops: RowOps, values: jax.Array, rows: ChunkRows) -> tuple[Any, ...]:
        def scan(rows: ChunkRows) -> tuple[jax.Array, jax.Array]:
            out: Any = value_scan(values, slot_ids, rows, groups, PLAIN, ops)
            return out.output, out.values

        read, back, written = jax.vjp(scan, rows, has_aux=True)
        return read, written, back(read)[0]

    actual, expected = (results(ops, arrays["values"], rows) for ops in (row_ops(kernel), RowOps()))
    return relative_errors(actual, expected)
