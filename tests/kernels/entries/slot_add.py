"""Additions to rows, the rows before them, and the cotangents of every array."""

import jax.numpy as jnp

from pallas_kernels.slot_add.api import slot_add
from pallas_kernels.slot_add.specs import SPECS, sample
from tests.kernels.entries.slot_read import interpreted_only
from tests.kernels.entry import Entry


def call(spec, backend, *, groups, **arrays):
    values, old_rows = slot_add(groups=groups, **arrays, with_old_rows=True, backend=backend)
    specified = jnp.arange(old_rows.shape[0]) < groups.num_groups
    return values, jnp.where(specified[:, None], old_rows, 0.0)


ENTRY = Entry(
    op="slot_add",
    specs=SPECS,
    sample=sample,
    call=call,
    differentiable=("values", "coefficients", "rows"),
    ratio=2e-6,
    vjp_has_kernels=False,
    not_interpreted=interpreted_only(
        tpu=("one_reference", "63_tokens", "distinct", "many_tiles"),
        gpu=("one_token", "63_tokens", "three_slots", "one_slot"),
    ),
)
