"""No warp of a Mosaic GPU kernel runs ahead of the others where they share memory.

`shared_memory.py` follows the kernels' programs. Nothing is compiled or run.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cross_entropy, dispatch
from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.add_rms_norm import specs as add_rms_norm_specs
from pallas_kernels.cross_entropy import specs as cross_entropy_specs
from pallas_kernels.gated_delta import chunk_gated_delta_rule
from pallas_kernels.gated_delta import specs as gated_delta_specs
from pallas_kernels.key_scan import gpu_add
from pallas_kernels.mix_rms_norm import mix_rms_norm
from pallas_kernels.mix_rms_norm import specs as mix_rms_norm_specs
from pallas_kernels.product_top_k import select_slots
from pallas_kernels.product_top_k import specs as top_k_specs
from pallas_kernels.short_convolution import short_convolution
from pallas_kernels.short_convolution import specs as convolution_specs
from tests.kernels.entry import equations
from tests.kernels.shared_memory import barriers_missing, unordered_accesses

GATED_DELTA = {"prepare", "walk", "read", "before_walk", "walk_back", "after_walk"}
WIDE = gated_delta_specs.GatedDeltaSpec(name="here", length=129, heads=2, key=128, value=256)


def kernels_of(function, *arguments):
    """The equations of the Mosaic GPU kernels that a function launches, by name."""
    with dispatch.compile_kernels("gpu"):
        program = jax.make_jaxpr(function)(*arguments)
    found = [x for x in equations(program.jaxpr) if x.primitive.name == "mpmd_map"]
    return {x.params["name"]: x for x in found}


def gated_delta(spec, dtype):
    arrays = jax.eval_shape(lambda: gated_delta_specs.sample(spec, dtype))

    def both(arrays):
        outputs, back = jax.vjp(lambda x: chunk_gated_delta_rule(**x, backend="pallas"), arrays)
        return back(outputs)

    return kernels_of(both, arrays)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("width", [64, 128])
def test_the_gated_delta_rules_kernels_have_the_barriers_that_they_need(width, dtype):
    spec = dataclasses.replace(WIDE, key=width, value=2 * width)
    kernels = gated_delta(spec, dtype)
    assert set(kernels) == {f"gated_delta_{name}" for name in GATED_DELTA}
    for kernel in kernels.values():
        assert kernel.params["compiler_params"].unsafe_no_auto_barriers
        assert barriers_missing(kernel) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("left_out", "found"),
    [
        ("commit_smem", {"stored", "unfenced", "loaded"}),
        ("barrier_wait", {"arriving"}),
        ("wait_smem_to_gmem", {"leaving"}),
    ],
)
def test_what_is_left_out_is_found(left_out, found, monkeypatch):
    monkeypatch.setattr(plgpu, left_out, lambda *_: None)
    # As many chunks as no other: what was traced before is not traced again.
    spec = dataclasses.replace(WIDE, length=200 + 64 * len(left_out))
    missing = [x for k in gated_delta(spec, jnp.bfloat16).values() for x in barriers_missing(k)]
    assert {kind for kind in found if any(f"{kind} before" in x for x in missing)} == found


def selection(tokens):
    spec = top_k_specs.TopKSpec(name="here", tokens=tokens, subkeys=512, key=256, top_k=8)
    arrays = jax.eval_shape(lambda: top_k_specs.sample(spec, jnp.float32))
    select = functools.partial(select_slots, top_k=spec.top_k, backend="pallas")
    return kernels_of(lambda x: select(**x), arrays)["product_top_k_select"]


@pytest.mark.thorough
def test_the_warpgroups_of_the_selection_wait_for_their_keys_and_for_each_other():
    kernel = selection(64)
    for group in range(2):
        assert barriers_missing(kernel, axes={"group": group}) == []
    assert unordered_accesses(kernel, axis="group") == []


@pytest.mark.thorough
def test_a_wait_that_the_selection_leaves_out_is_found(monkeypatch):
    right, waits = plgpu.barrier_wait, []

    def wait(barrier):
        waits.append(barrier)
        if len(waits) != left_out + 1:
            right(barrier)

    monkeypatch.setattr(plgpu, "barrier_wait", wait)
    found = {}
    # In the order of the program; a new number of tokens is traced anew.
    for left_out, name in enumerate(("split", "arrived", "scored", "exchanged")):
        waits.clear()
        kernel = selection(128 * (left_out + 1))
        assert len(waits) == 4
        unordered = unordered_accesses(kernel, axis="group")
        found[name] = bool(barriers_missing(kernel)), bool(unordered)
    assert found == {
        "split": (False, True),
        "arrived": (True, False),
        "scored": (False, True),
        "exchanged": (False, True),
    }


def sums_of_keys(tiles, dtype=jnp.float32):
    """The kernel with as many tiles of tokens for each program."""
    chunks, codebooks, top_k, tokens = 2, 2, 8, 64 * gpu_add.SPLITS * tiles
    chosen = (chunks, codebooks, top_k, tokens)

    def sums(queries, *arrays):
        return gpu_add.add(gpu_add.query_terms(queries), *arrays, subkeys=128)

    return kernels_of(
        sums,
        jax.ShapeDtypeStruct((chunks, tokens, codebooks * 128), dtype),
        jax.ShapeDtypeStruct((1,), jnp.int32),
        jax.ShapeDtypeStruct(chosen, jnp.int32),
        jax.ShapeDtypeStruct(chosen, jnp.float32),
    )["key_scan_add"]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_sums_of_the_key_scan_wait_for_their_queries_and_for_each_other(dtype):
    kernel = sums_of_keys(4, dtype)
    for group in range(2):
        assert barriers_missing(kernel, axes={"group": group}) == []
    assert unordered_accesses(kernel, axis="group") == []


def test_a_wait_that_the_sums_of_the_key_scan_leave_out_is_found(monkeypatch):
    right, waits, found = plgpu.barrier_wait, [], {}

    def wait(barrier):
        waits.append(barrier)
        if len(waits) != len(found) + 1:
            right(barrier)

    monkeypatch.setattr(plgpu, "barrier_wait", wait)
    for name in ("choice_here", "queries_here", "used"):
        waits.clear()
        kernel = sums_of_keys(3)
        assert len(waits) == 3
        unordered = unordered_accesses(kernel, axis="group")
        found[name] = bool(barriers_missing(kernel)), bool(unordered)
    assert found == {
        "choice_here": (True, True),
        "queries_here": (True, True),
        "used": (False, True),
    }


def losses_of_rows(vocab):
    spec = cross_entropy_specs.RowSpec(name="here", tokens=3, vocab=vocab)
    arrays = jax.eval_shape(lambda: cross_entropy_specs.sample(spec))
    call = functools.partial(cross_entropy.row_cross_entropy, dtype=jnp.bfloat16, backend="pallas")
    return kernels_of(lambda x: call(**x), arrays)["cross_entropy"]


@pytest.mark.parametrize("vocab", [384, 4096, 32_000])
def test_the_losses_of_rows_wait_for_their_logits(vocab):
    assert barriers_missing(losses_of_rows(vocab)) == []


def test_a_wait_that_the_losses_of_rows_leave_out_is_found(monkeypatch):
    monkeypatch.setattr(plgpu, "barrier_wait", lambda _: None)
    assert any("arriving before" in x for x in barriers_missing(losses_of_rows(8192)))


def test_norms_share_no_memory_but_for_the_sums_of_their_rows():
    spec = add_rms_norm_specs.NormSpec(name="here", length=96, width=256)
    arrays = jax.eval_shape(lambda: add_rms_norm_specs.sample(spec, jnp.bfloat16))

    def both(arrays):
        call = functools.partial(add_rms_norm, eps=spec.eps, backend="pallas")
        outputs, back = jax.vjp(lambda x: call(**x), arrays)
        return back(outputs)

    kernels = kernels_of(both, arrays)
    assert set(kernels) == {"add_rms_norm", "add_rms_norm_back"}
    for kernel in kernels.values():
        assert barriers_missing(kernel) == []
        assert not kernel.params["jaxprs"][0].invars[len(kernel.invars) + len(kernel.outvars) :]


def test_norms_of_mixes_share_no_memory_but_for_the_sums_of_their_rows():
    spec = mix_rms_norm_specs.MixSpec(name="here", batch=2, length=48, width=256)
    arrays = jax.eval_shape(lambda: mix_rms_norm_specs.sample(spec, jnp.bfloat16))

    def both(arrays):
        call = functools.partial(mix_rms_norm, eps=spec.eps, dtype=jnp.bfloat16, backend="pallas")
        output, back = jax.vjp(lambda x: call(**x), arrays)
        return back(output)

    kernels = kernels_of(both, arrays)
    assert set(kernels) == {"mix_rms_norm", "mix_rms_norm_back"}
    for kernel in kernels.values():
        assert barriers_missing(kernel) == []
        assert not kernel.params["jaxprs"][0].invars[len(kernel.invars) + len(kernel.outvars) :]


@pytest.mark.thorough
def test_the_short_convolutions_kernels_share_no_memory():
    spec = next(spec for spec in convolution_specs.SPECS if spec.name == "several_tiles")
    arrays = jax.eval_shape(lambda: convolution_specs.sample(spec, jnp.bfloat16))
    documents = arrays.pop("documents")

    def both(arrays, documents):
        call = functools.partial(short_convolution, parts=spec.parts, backend="pallas")
        outputs, back = jax.vjp(lambda x: call(**x, documents=documents), arrays)
        return back(outputs)

    kernels = kernels_of(both, arrays, documents)
    assert set(kernels) == {"short_convolution", "short_convolution_back"}
    for kernel in kernels.values():
        assert barriers_missing(kernel) == []
