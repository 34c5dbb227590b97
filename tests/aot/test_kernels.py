"""Every kernel lowers for the TPU everywhere, and compiles for v5e, v5p, v6e, 7x and H100."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from benchmarks.compiled import gated_delta
from benchmarks.compiled.absent_devices import DEVICES, TPUS, kernel_of, kernels_for
from benchmarks.compiled.assembler import assembled
from fwpkm_jax.core.slots.keys.addressing import best_sub_keys
from fwpkm_jax.core.slots.keys.scan import key_scan
from fwpkm_jax.core.slots.write import KeyWrite
from pallas_kernels.key_scan.api import key_loops
from pallas_kernels.product_top_k import select_slots
from pallas_kernels.product_top_k.api import WIDEST_HALF
from pallas_kernels.slot_add.tpu import RESIDENT
from tests.aot.devices import absent_device
from tests.kernels.entries import ENTRIES

# CI compiles for the oldest TPU, the weekly run for the newer ones, too.
SOME_DEVICES = [
    pytest.param(device, marks=pytest.mark.slow) if device in ("v5p", "v6e", "7x") else device
    for device in DEVICES
]
CUSTOM_CALL = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}


def directions(entry):
    vjp = entry.differentiable and entry.vjp_has_kernels
    return ["outputs"] * entry.outputs_have_kernels + ["cotangents"] * bool(vjp)


COMPILED = [
    pytest.param(entry, spec, direction, id=f"{entry.op}-{spec.name}-{direction}")
    for entry in ENTRIES
    for spec in entry.specs
    if spec.compiled
    for direction in directions(entry)
]


def abstract(entry, spec, sharding=None, dtype=jnp.float32):
    """The arrays of one call, as shapes and dtypes: nothing of the paper's widths is made."""
    arrays = jax.eval_shape(lambda: entry.sample(spec, dtype))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays)


@pytest.mark.parametrize(("entry", "spec", "direction"), COMPILED)
def test_kernels_lower_for_the_tpu_on_any_machine(entry, spec, direction):
    if "tpu" not in entry.kernels:
        pytest.skip(f"{entry.op} has no tpu kernel")
    arrays = abstract(entry, spec)
    with kernels_for("v5e"):
        traced = jax.jit(lambda x: getattr(entry, direction)(spec, "pallas", x)).trace(arrays)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert CUSTOM_CALL["tpu"] in text


@pytest.mark.aot
@pytest.mark.parametrize("device", SOME_DEVICES)
@pytest.mark.parametrize(("entry", "spec", "direction"), COMPILED)
def test_kernels_compile_ahead_of_time(entry, spec, direction, device):
    kernel = kernel_of(device)
    if kernel not in entry.kernels:
        pytest.skip(f"{entry.op} has no {kernel} kernel")
    arrays = abstract(entry, spec, SingleDeviceSharding(absent_device(device)))
    with kernels_for(device):
        traced = jax.jit(lambda x: getattr(entry, direction)(spec, "pallas", x)).trace(arrays)
        compiled = traced.lower().compile()
    assert CUSTOM_CALL[kernel] in compiled.as_text()
    assert compiled.memory_analysis().output_size_in_bytes > 0


@pytest.mark.aot
@pytest.mark.parametrize("device", TPUS)
def test_slot_add_compiles_if_the_rows_of_all_tokens_do_not_fit_vmem(device):
    entry = next(entry for entry in ENTRIES if entry.op == "slot_add")
    spec = next(spec for spec in entry.specs if spec.name == "chunk")
    spec = dataclasses.replace(spec, tokens=RESIDENT // (4 * spec.value) + 1)
    arrays = abstract(entry, spec, SingleDeviceSharding(absent_device(device)))
    with kernels_for(device):
        jax.jit(lambda x: entry.outputs(spec, "pallas", x)).trace(arrays).lower().compile()


@pytest.mark.aot
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_an_h100_the_gated_delta_rules_kernels_spill_no_registers(dtype):
    absent_device("h100")  # Skips where its compiler is not installed.
    *rows, together = gated_delta.measure(gated_delta.Options(), dtype)
    assert len(rows) == 6
    assert together["kernel"] == "all"
    assert all(row["spill_store_bytes"] == 0 < row["registers"] for row in rows)
    # An inverse by masks of the whole chunk had 6,500 instructions and 61 barriers with bfloat16.
    prepare = next(row for row in rows if row["kernel"] == "prepare")
    assert prepare["instructions"] < (3000 if dtype == "bfloat16" else 3600)
    assert prepare["barriers"] < 25


SPILL_NOTHING = {
    **{"cross_entropy": "tokens", "add_rms_norm": "length", "mix_rms_norm": "batch"},
    "embed": "length",
}
"""Operations whose kernels keep all they hold in registers, and what counts their rows."""


@pytest.mark.aot
@pytest.mark.parametrize(
    ("entry", "spec", "direction"), [x for x in COMPILED if x.values[0].op in SPILL_NOTHING]
)
def test_on_an_h100_kernels_spill_no_registers(entry, spec, direction):
    sharding = SingleDeviceSharding(absent_device("h100"))
    # Of another size: the assembler says nothing about a kernel that was compiled before.
    rows = SPILL_NOTHING[entry.op]
    more = 64 * (1 + entry.specs.index(spec))
    spec = dataclasses.replace(spec, **{rows: getattr(spec, rows) + more})
    with kernels_for("h100"):
        call = jax.jit(functools.partial(getattr(entry, direction), spec, "pallas"))
        report = assembled(call.trace(abstract(entry, spec, sharding)))
    assert report
    assert all(row["spill_store_bytes"] == 0 < row["registers"] for row in report.values())


@pytest.mark.aot
@pytest.mark.parametrize("name", ["paper", "paper_packed", "wide_packed"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_on_an_h100_the_short_convolutions_kernels_spill_no_registers(name, dtype):
    entry = next(entry for entry in ENTRIES if entry.op == "short_convolution")
    spec = next(spec for spec in entry.specs if spec.name == name)
    arrays = abstract(entry, spec, SingleDeviceSharding(absent_device("h100")), dtype)
    with kernels_for("h100"):
        both = jax.jit(lambda x: entry.outputs_and_cotangents(spec, "pallas", x))
        rows = assembled(both.trace(arrays))
    assert set(rows) == {"short_convolution", "short_convolution_back"}
    assert all(row["spill_store_bytes"] == 0 < row["registers"] for row in rows.values())


@pytest.mark.aot
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("half", [128, 256])
def test_on_an_h100_the_key_scans_kernels_spill_no_registers(half, dtype):
    sharding = SingleDeviceSharding(absent_device("h100"))
    scan = functools.partial(
        key_scan,
        find=functools.partial(best_sub_keys, top_k=8),
        key_write=KeyWrite(learning_rate=1.0, loss_weight=1.0, score="idw"),
        loops=key_loops("gpu", 8),
    )

    def moved(*arrays):
        return jnp.sum(scan(*arrays).keys ** 2)

    keys, queries, weights = (1, 2, 128, half), (3, 192, 1, 2 * half), (3, 192)
    arrays = [
        jax.ShapeDtypeStruct(shape, of, sharding=sharding)
        for shape, of in ((keys, jnp.float32), (queries, dtype), (weights, jnp.float32))
    ]
    with kernels_for("h100"):
        rows = assembled(jax.jit(jax.grad(moved, argnums=1)).trace(*arrays))
    assert {"key_scan_add", "key_scan_pulls_back"} <= set(rows)  # jax 0.10 does not name all.
    assert all(row["spill_store_bytes"] == 0 < row["registers"] for row in rows.values())


@pytest.mark.aot
def test_the_widest_keys_that_the_gpus_kernel_takes_fit_its_shared_memory():
    half = WIDEST_HALF["gpu"]
    sharding = SingleDeviceSharding(absent_device("h100"))
    shapes = (256, 1, 2 * half), (1, 2, 512, half)
    arrays = (jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in shapes)
    with kernels_for("h100"):
        select = functools.partial(select_slots, top_k=8, backend="pallas")
        jax.jit(select).trace(*arrays).lower().compile()
        with pytest.raises(NotImplementedError, match="at most 1024, 32 and 320"):
            jax.eval_shape(select, jnp.zeros((5, 1, 768)), jnp.zeros((1, 2, 512, 384)))
