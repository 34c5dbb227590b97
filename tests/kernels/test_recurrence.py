"""The kernels of other packages: what they are given, and when they are refused."""

import dataclasses
import importlib
import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax import functions
from fwpkm_jax.core.recurrence.linear_recurrence import chunk_recurrence
from fwpkm_jax.rules.matrix import MATRIX_RULES, Tokens
from pallas_kernels import dispatch
from pallas_kernels.checks import relative_errors, results_of
from pallas_kernels.gated_delta import chunk_gated_delta_rule
from pallas_kernels.gated_delta import specs as gated_delta
from pallas_kernels.recurrence import linear_recurrence, specs
from tests.kernels.entry import checked_again

KINDS = {
    "chunk_gdn": ("g", "beta"),
    "chunk_kda": ("g", "beta"),
    "chunk_gla": ("g",),
    "chunk_delta_rule": ("beta",),
}


def segmented(query, key, value, *, g, beta, scale, initial_state, segment_ids):
    """A memory by their conventions: it starts anew where the id changes, not at a row's start."""
    starts = None
    if segment_ids is not None:
        changes = segment_ids[:, 1:] != segment_ids[:, :-1]
        starts = jnp.pad(changes, ((0, 0), (1, 0)))
    return chunk_recurrence(
        scale * query,
        key,
        value,
        log_decay=g,
        beta=beta,
        initial_state=initial_state,
        starts=starts,
    )


@pytest.fixture
def calls(monkeypatch):
    """Stand-ins of both packages, and what they were asked for."""
    calls = []

    def linear_attention(kind, q, k, v, *, impl, g=None, beta=None, output_final_state, **how):
        assert impl == "mosaic_gpu"
        assert output_final_state
        assert {x.dtype for x in (q, k, v)} == {jnp.dtype(jnp.bfloat16)}
        calls.append(kind)
        output, final = segmented(q, k, v, g=g, beta=beta, **how)
        return output.astype(q.dtype), final

    def call(name, q, k, v, *gates, precision, output_final_state, **how):
        assert output_final_state
        given = dict(zip(KINDS[name], gates, strict=False))
        given |= {gate: how.pop(gate) for gate in ("g", "beta") if gate in how}
        calls.append(f"{name} {precision}")
        assert {*given} == {*KINDS[name]}
        return segmented(q, k, v, g=given.get("g"), beta=given.get("beta"), **how)

    jla, ops, deltanet = (types.ModuleType(name) for name in ("jla", "jla.ops", "deltanet_tpu"))
    ops.linear_attention = linear_attention
    for name in KINDS:
        setattr(deltanet, name, lambda *x, name=name, **how: call(name, *x, **how))
    for module in (jla, ops, deltanet):
        module.__spec__ = importlib.util.spec_from_loader(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with checked_again(), dispatch.default_backend("auto"), dispatch._simulation(None):
        yield calls


DEVICES = {"jla": "gpu", "deltanet_tpu": "tpu"}
each_library = pytest.mark.parametrize("library", DEVICES)
RATIOS = {"jla": 2e-2, "deltanet_tpu": 2e-6}
"""Only the first rounds to bfloat16."""
CALLED = {
    "jla": ("deltanet", "kda", "gla", "simple_gla", "simple_gla", "gated_deltanet"),
    "deltanet_tpu": (
        *("chunk_delta_rule fp32", "chunk_kda fp32", "chunk_gla fp32", "chunk_gla fp32"),
        *("chunk_gla fp32", "chunk_gdn fp32"),
    ),
}


@pytest.mark.slow
@each_library
def test_a_library_is_given_the_same_memory(library, calls):
    for spec in specs.SPECS:
        arrays = specs.sample(spec, jnp.float32)
        with dispatch.compile_kernels(DEVICES[library]):
            found = linear_recurrence(**arrays, backend=library)
        errors = relative_errors(found, linear_recurrence(**arrays, backend="reference"))
        assert max(errors.values()) < RATIOS[library], spec.name
    spec = gated_delta.COMPARISON.named("documents")
    arrays = gated_delta.sample(spec, jnp.float32)
    expected = results_of(chunk_gated_delta_rule, arrays)("reference")
    with dispatch.compile_kernels(DEVICES[library]):
        found = results_of(chunk_gated_delta_rule, arrays)(library)
    errors = relative_errors(found, expected)
    assert max(errors.values()) < RATIOS[library]
    assert tuple(dict.fromkeys(calls)) == tuple(dict.fromkeys(CALLED[library]))


@pytest.mark.thorough("True-jla")
@each_library
@pytest.mark.parametrize("first", [True, False])
def test_a_document_that_starts_a_row_leaves_the_given_memory_out(library, first, calls):
    arrays = specs.sample(specs.SPECS[0], jnp.float32)
    starts = arrays.pop("starts").at[:, 0].set(first)
    empty = arrays | {"initial_state": jnp.zeros_like(arrays["initial_state"])}
    with dispatch.compile_kernels(DEVICES[library]):
        given, without = (
            linear_recurrence(**x, starts=starts, backend=library).output for x in (arrays, empty)
        )
    assert np.array_equal(given, without) is first
    assert calls


def tokens_of(width=128, heads=1, length=5):
    """q, k, v of one sequence."""
    shape = (1, length, heads, width)
    return [jax.random.normal(jax.random.key(n), shape) / width**0.5 for n in range(3)]


@pytest.mark.slow
@each_library
def test_functions_and_rules_run_a_library_that_is_asked_for(library, calls):
    q, k, v = tokens_of()
    g, beta, ids = jnp.full((1, 5, 1), -0.1), jnp.full((1, 5, 1), 0.5), jnp.array([[1, 1, 2, 2, 0]])

    def results(backend):
        how = {"segment_ids": ids, "backend": backend}
        yield functions.gated_delta_rule(q, k, v, g, beta, **how)
        yield functions.matrix_memory("gated_deltanet", q, k, v, g=g, beta=beta, **how)
        yield functions.matrix_memory("kda", q, k, v, g=g[..., None] + 0 * k, beta=beta, **how)
        yield functions.matrix_memory("mamba2", q, k, v, g=g, beta=beta, **how)

    with dispatch.compile_kernels(DEVICES[library]):
        found = list(results(library))
    assert len(calls) == 4
    for one, expected in zip(found, results("reference"), strict=True):
        assert max(relative_errors(tuple(one), tuple(expected)).values()) < RATIOS[library]
    assert len(calls) == 4
    with dispatch.compile_kernels(DEVICES[library]), dispatch.default_backend(library):
        MATRIX_RULES["deltanet"]().run(Tokens(q, k, v, strength=beta))
        assert len(calls) == 5
        # An operation that the library has no kernels for is not changed.
        assert dispatch.Operation("op", lambda kernel: None).choose("auto") == DEVICES[library]


@each_library
def test_a_library_that_is_not_here_is_named(library):
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is here")
    q, k, v = tokens_of()
    distribution = dispatch.LIBRARIES[library].distribution
    with pytest.raises(
        ModuleNotFoundError, match=f"needs the package {distribution}, which is not"
    ):
        functions.matrix_memory("retnet", q, k, v, g=jnp.zeros((1, 5, 1)), backend=library)


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    ("library", "rule", "sizes", "lacking"),
    [
        ("jla", "deltanet", {"width": 32}, "keys of width 32 and values of width 32, only 64 and"),
        ("deltanet_tpu", "deltanet", {"width": 64}, "values of width 64, only 128"),
        ("jla", "kda", {"width": 64, "heads": 3}, "192 key columns of all heads"),
        ("jla", "deltaproduct", {}, "several writes per token"),
        ("jla", "mlstm", {}, "jla has no kernels for MLSTM"),
    ],
)
def test_what_a_library_does_not_take_is_refused(library, rule, sizes, lacking):
    q, *written = tokens_of(**sizes)
    rule = MATRIX_RULES[rule]()
    k, v = (jnp.repeat(x, rule.steps, axis=1) for x in written)
    g = {"none": None, "head": -(k[:, :5, :, 0] ** 2), "key": -(q**2)}[rule.decay]
    beta = jnp.full(k.shape[:3], 0.5) if rule.strength else None
    with (
        dispatch.compile_kernels(DEVICES[library]),
        pytest.raises(NotImplementedError, match=lacking),
    ):
        functions.matrix_memory(rule, q, k, v, g=g, beta=beta, backend=library)


@pytest.mark.usefixtures("calls")
def test_a_library_runs_on_its_own_devices_alone():
    q, k, v = tokens_of()
    g = beta = jnp.zeros((1, 5, 1))
    with pytest.raises(NotImplementedError, match="does not take platform 'cpu', only 'gpu'"):
        functions.gated_delta_rule(q, k, v, g, beta, backend="jla")
    with (
        dispatch.interpret_kernels("gpu"),
        pytest.raises(NotImplementedError, match="does not take the interpreter"),
    ):
        functions.gated_delta_rule(q, k, v, g, beta, backend="jla")
    with pytest.raises(
        ValueError, match=r"backend='jla' is none of \['auto', 'reference', 'pallas'\]"
    ):
        dispatch.Operation("op", lambda kernel: None).choose("jla")


@pytest.mark.thorough("False")
@pytest.mark.parametrize("broken", [False, True])
def test_a_library_is_compared_with_plain_jax_before_its_first_use(calls, broken, monkeypatch):
    # A check without a name runs in this process.
    monkeypatch.setattr(
        dispatch.Operation, "checked_by", property(lambda _: specs.COMPARISON.check)
    )
    monkeypatch.setattr(dispatch, "version", lambda distribution: "0")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "_device_lacks", lambda kernel: None)
    if broken:
        right = sys.modules["jla.ops"].linear_attention
        wrong = lambda kind, q, k, v, **how: right(kind, q, k, 1.1 * v, **how)  # noqa: E731
        monkeypatch.setattr(sys.modules["jla.ops"], "linear_attention", wrong)
    q, k, v = tokens_of()

    def call():
        return functions.matrix_memory("deltanet", q, k, v, beta=k[..., 0] ** 2, backend="jla")

    if broken:
        with pytest.raises(RuntimeError, match=r"failed its check on this device: .* differs by"):
            call()
        assert calls
        return
    call()
    kinds = {"deltanet", "kda", "gla", "simple_gla"}
    assert {*calls} == kinds
    calls.clear()
    call()
    assert calls == ["deltanet"]


def library_itself(name):
    """The installed package, with whose version of jax these tests then run."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs the package {dispatch.LIBRARIES[name].distribution}")
    return importlib.import_module({"jla": "jla.ops"}.get(name, name))


@pytest.mark.filterwarnings("ignore:deltanet-tpu. running on non-TPU backend")
@each_library
@pytest.mark.parametrize("spec", specs.SPECS, ids=lambda spec: spec.name)
def test_the_package_itself_agrees_on_a_cpu(library, spec, monkeypatch):
    """deltanet-tpu's kernels are interpreted; jax-linear-attention's plain JAX takes the calls."""
    module = library_itself(library)
    if library == "jla":
        plain = module.linear_attention
        monkeypatch.setattr(
            module, "linear_attention", lambda *x, **how: plain(*x, **how | {"impl": "chunked"})
        )
    arrays = specs.sample(dataclasses.replace(spec, length=150, heads=1), jnp.bfloat16)
    call = results_of(linear_recurrence, arrays)
    with dispatch.compile_kernels(DEVICES[library]):
        found = call(library)
    errors = relative_errors(found, call("reference"))
    assert max(errors.values()) < specs.COMPARISON.ratios["bfloat16"], errors
