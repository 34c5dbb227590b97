"""Calls of every kernel whose results are compared with the reference's on the device.

The shapes reach the steady state of the kernels: their pipelines refill every slot, runs of
references are longer than one owner sums, and all widths are the paper's. `tiny` has one small
shape for each operation, for interpreted kernels on a CPU.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.machine import queued_seconds
from fwpkm_jax.core.slots.keys.scan import KeyLoops
from fwpkm_jax.core.slots.write import PLAIN, KeyWrite
from fwpkm_jax.rules import FwPKM, FwPKMMemory
from pallas_kernels import dispatch
from pallas_kernels.add_rms_norm import specs as add_rms_norm
from pallas_kernels.checks import relative_errors, results_of
from pallas_kernels.cross_entropy import specs as cross_entropy
from pallas_kernels.dispatch import Backend, Kernel
from pallas_kernels.embed import specs as embed
from pallas_kernels.gated_delta import specs as gated_delta
from pallas_kernels.key_scan import api as key_scan
from pallas_kernels.key_scan import specs as key_scan_specs
from pallas_kernels.mix_rms_norm import specs as mix_rms_norm
from pallas_kernels.product_top_k import api as product_top_k
from pallas_kernels.product_top_k import specs as product_top_k_specs
from pallas_kernels.row_ops import VALUE_SCAN
from pallas_kernels.short_convolution import specs as short_convolution
from pallas_kernels.slot_add import specs as slot_add
from pallas_kernels.slot_read import specs as slot_read
from pallas_kernels.spec import Comparison

LIMIT_S = 120.0
"""Seconds for a case, start of the process and compilation included: the longest took 55 s beside
five others on a host of 16 cores."""
LONG_LIMIT_S = 200.0
"""The same for whole memories."""
CHOICE_LIMIT_S = 220.0
"""The same where the program checks kernels before their first use."""
MEMORY_RATIO = 1e-3
"""Chunks after a near tie among slots read a memory with another row in it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call, and what it may differ by."""

    run: Callable[[], dict[str, Any]]
    """Errors by array, and times."""
    ratio: float = 0.0
    """Largest error allowed, relative to an array's norm."""
    limit_s: float = LIMIT_S
    """Seconds after which its process is ended."""
    folders: tuple[str, ...] = ()
    """Folders of `pallas_kernels` that it compares; none: all, and the library."""
    heavy: bool = False
    """Whether it compiles for a minute and more: it starts when all others have."""

    @property
    def place(self) -> int:
        """When it starts: kernels first, then whole memories, then what compiles longest."""
        return 2 if self.heavy else int(not self.folders)


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """The cases of an operation whose results and cotangents are compared by its own table."""

    comparison: Comparison
    names: tuple[str, ...]
    """Of the specs to compare."""
    tiny: tuple[str, ...] = ("one_token",)
    """The same for interpreted kernels."""
    folders: tuple[str, ...]
    heavy: tuple[str, ...] = ()
    """Specs that compile for a minute and more."""
    on_cpu: Kernel = "tpu"
    """The kernels that a CPU interprets."""


_ROWS: Any = {"names": (*slot_read.CHECKED, "paper"), "tiny": ("63_tokens",)}
_ROWS |= {"folders": ("slot_read", "slot_add")}
_COMPARED = {
    "slot_read": _Compared(comparison=slot_read.READS, **_ROWS),
    "slot_dot": _Compared(comparison=slot_read.DOTS, **_ROWS),
    "slot_add": _Compared(comparison=slot_add.COMPARISON, **_ROWS),
    "chunk_gated_delta_rule": _Compared(
        comparison=gated_delta.COMPARISON,
        names=("five_chunks", "wide", "widest"),
        tiny=("narrow",),
        folders=("gated_delta", "recurrence"),
        heavy=("wide", "widest"),
    ),
    "cross_entropy": _Compared(
        comparison=cross_entropy.COMPARISON,
        names=("tiles_and_rest", "100_tokens", "widest", "paper"),
        tiny=("one_group",),
        folders=("cross_entropy",),
        on_cpu="gpu",
    ),
    "short_convolution": _Compared(
        comparison=short_convolution.COMPARISON,
        names=(
            "100_tokens",
            "several_tiles",
            "flat",
            "wide",
            "wide_packed",
            "paper",
            "paper_packed",
        ),
        tiny=("packed",),
        folders=("short_convolution",),
        on_cpu="gpu",
    ),
    "add_rms_norm": _Compared(
        comparison=add_rms_norm.COMPARISON,
        names=("100_tokens", "widest", "paper", "paper_alone"),
        folders=("add_rms_norm",),
        on_cpu="gpu",
    ),
    "mix_rms_norm": _Compared(
        comparison=mix_rms_norm.COMPARISON,
        names=("100_tokens", "widest", "paper"),
        folders=("mix_rms_norm",),
        on_cpu="gpu",
    ),
    "embed": _Compared(
        comparison=embed.COMPARISON,
        names=("one_often", "100_tokens", "paper"),
        folders=("embed", "slot_add", "slot_read"),
        on_cpu="gpu",
    ),
}


def cases(size: str) -> dict[str, Case]:
    """The cases by name, each operation's small ones first."""
    tiny = size == "tiny"
    found: dict[str, Case] = {}
    for name in ("63_tokens",) if tiny else ("steady", "steady_dot", "paper"):
        spec = _named(product_top_k_specs.SPECS, name)
        found[f"product_top_k/{name}"] = Case(
            run=lambda spec=spec: _selection(spec),
            ratio=product_top_k_specs.CHECK_RATIO,
            folders=("product_top_k",),
        )
    for op, compared in _COMPARED.items():
        comparison = compared.comparison
        for name in compared.tiny if tiny else compared.names:
            for dtype, ratio in comparison.ratios.items():
                # One dtype needs no name.
                case = f"{op}/{name}/{dtype}" if len(comparison.ratios) > 1 else f"{op}/{name}"
                found[case] = Case(
                    run=lambda compared=compared, name=name, dtype=dtype: _compared(
                        compared, name, dtype
                    ),
                    ratio=ratio,
                    folders=compared.folders,
                    heavy=name in compared.heavy,
                )
    for groups in (1, 2 if tiny else 8):
        found[f"memory/{groups}_groups"] = Case(
            run=lambda groups=groups: _memory(groups, tiny=tiny),
            ratio=MEMORY_RATIO,
            # Most of it compiles; a CPU compiles the interpreters of all kernels in a scan.
            limit_s=300.0 if tiny else LONG_LIMIT_S,
        )
    for name in () if tiny else key_scan_specs.CHECKED:
        spec = _named(key_scan_specs.SPECS, name)
        for dtype in key_scan_specs.DTYPES:
            found[f"memory/keys_{name}/{dtype}"] = Case(
                run=lambda spec=spec, dtype=dtype: _keys(spec, dtype),
                ratio=key_scan_specs.CHECK_RATIO,
                limit_s=LONG_LIMIT_S,
                folders=_KEYS,
            )
    for op, (run, folders) in _CHOICES.items():
        found[f"choice/{op}"] = Case(run=run, limit_s=CHOICE_LIMIT_S, folders=folders)
    return found


def work(task: dict[str, str]) -> dict[str, Any]:
    """The outcome of the case `task["case"]` in this process."""
    return outcome(cases(task["size"])[task["case"]])


def outcome(case: Case) -> dict[str, Any]:
    """The row of a case: its verdict, errors, times, and which implementations ran."""
    began = time.perf_counter()
    measured = case.run()
    errors: dict[str, float] = measured.pop("errors", {})
    worst = max(errors, key=lambda name: _size(errors[name]), default=None)
    agrees = worst is None or _size(errors[worst]) <= case.ratio
    row = {"verdict": "agrees" if agrees else "differs", **measured}
    if worst is not None:
        row |= {"worst": worst, "error": errors[worst], "allowed": case.ratio, "errors": errors}
    return row | {
        "total_seconds": time.perf_counter() - began,
        "implementations": [
            {"op": op, "implementation": how, "reason": why}
            for op, how, why in sorted(dispatch.decisions)
            if why != "by request"
        ],
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def _size(error: float) -> float:
    """An error to compare; one that is no number exceeds every bound."""
    return error if error == error else float("inf")


def _kernels(
    on_cpu: Kernel = "tpu",
) -> tuple[Kernel, contextlib.AbstractContextManager[None]]:
    """This device's kernels, and the context that runs them without a check before first use.

    A CPU interprets those for `on_cpu`.
    """
    platform = jax.default_backend()
    if platform == "cpu":
        return on_cpu, dispatch.interpret_kernels(on_cpu)
    kernel: Kernel = "tpu" if platform == "tpu" else "gpu"
    return kernel, dispatch.compile_kernels(kernel)


def _compare(
    op: Callable[..., Any],
    arrays: dict[str, Any],
    *,
    fixed: Sequence[str] = (),
    on_cpu: Kernel = "tpu",
) -> dict[str, Any]:
    """Errors of outputs and cotangents, and the time of both, of an operation's kernels."""
    results = results_of(op, arrays, fixed=fixed)
    with _kernels(on_cpu)[1]:
        actual = results("pallas")
        kernel_s, _ = queued_seconds(lambda: results("pallas"), repeats=3)
    expected = results("reference")
    reference_s, _ = queued_seconds(lambda: results("reference"), repeats=1)
    return {
        "errors": relative_errors(actual, expected),
        "milliseconds": 1e3 * kernel_s,
        "reference_milliseconds": 1e3 * reference_s,
    }


def _compared(compared: _Compared, name: str, dtype: str) -> dict[str, Any]:
    comparison, spec = compared.comparison, compared.comparison.named(name)
    op = partial(comparison.call, spec, jnp.dtype(dtype))
    arrays = comparison.sample(spec, jnp.dtype(dtype))
    return _compare(op, arrays, fixed=comparison.fixed, on_cpu=compared.on_cpu)


def _selection(spec: product_top_k_specs.TopKSpec) -> dict[str, Any]:
    arrays = product_top_k_specs.sample(spec, jnp.float32)

    @jax.jit
    def select(queries: jax.Array, keys: jax.Array) -> Any:
        return product_top_k.select_slots(
            queries, keys, top_k=spec.top_k, score=spec.score, backend="pallas"
        )

    with _kernels()[1]:
        errors = product_top_k_specs.selection_errors("pallas", spec, arrays)
        seconds, _ = queued_seconds(lambda: select(**arrays), repeats=3)
    return {"errors": errors, "milliseconds": 1e3 * seconds}


def _memory(groups: int, *, tiny: bool) -> dict[str, Any]:
    """Some chunks of FwPKM, forward and backward, with memories side by side."""
    # More memories have fewer tokens each: with ten thousand, some have a near tie among slots.
    dim, subkeys, chunk = (8, 6, 4) if tiny else (512, 128, 512 if groups == 1 else 128)
    rule = FwPKM(num_subkeys=subkeys, key_dim=dim, value_dim=dim, top_k=2 if tiny else 8)
    keys, values, _ = jax.vmap(rule.init)(jax.random.split(jax.random.key(0), groups))
    rngs = jax.random.split(jax.random.key(1), 3)
    tokens = (groups, 1 if tiny or groups > 1 else 2, (2 if tiny else 3) * chunk)
    arrays = {
        "keys": keys,
        "values": values,
        # Near the keys: a query far from all of them chooses by the last bits.
        "query": dim**-0.5 * jax.random.normal(rngs[0], (*tokens, 1, dim)),
        "value": jax.random.normal(rngs[1], (*tokens, dim)),
        "gate": jax.random.uniform(rngs[2], tokens),
    }

    def run(*, keys, values, query, value, gate, backend: Backend) -> Any:
        chosen = replace(rule, backend=backend)
        sequence = jax.vmap(lambda q, v, g: chosen.sequence(q, v, gate=g, chunk_size=chunk))(
            query, value, gate
        )
        out = chosen.run_groups(FwPKMMemory(keys, values), sequence, chunk_size=chunk)
        return out.output, out.memory

    return _compare(run, arrays, fixed=("keys", "values"))


def _keys(spec: key_scan_specs.KeySpec, dtype: str) -> dict[str, Any]:
    kernel, context = _kernels()
    ways = key_scan.key_loops(kernel, spec.top_k), KeyLoops()
    with context:
        return {"errors": key_scan_specs.errors_of(spec, *ways, dtype=dtype)}


def _chosen_selection() -> dict[str, Any]:
    spec = _named(product_top_k_specs.SPECS, "63_tokens")
    arrays: dict[str, Any] = product_top_k_specs.sample(spec, jnp.float32)
    product_top_k.select_slots(**arrays, top_k=spec.top_k)
    return {}


def _chosen_keys() -> dict[str, Any]:
    keys, queries = jnp.zeros((1, 2, 512, 256)), jnp.zeros((2, 512, 1, 512))
    write = KeyWrite(learning_rate=1.0, loss_weight=1.0, score="idw")
    key_scan.KEY_SCAN.choose("auto", keys, queries, 8, write)
    return {}


def _chosen_rows() -> dict[str, Any]:
    VALUE_SCAN.choose("auto", jnp.zeros((256, 512), jnp.float32), PLAIN)
    return {}


def _chosen(comparison: Comparison, dtype: str) -> dict[str, Any]:
    spec = comparison.specs[0]
    comparison.call(spec, jnp.dtype(dtype), **comparison.sample(spec, jnp.dtype(dtype)))
    return {}


_KEYS = ("key_scan", "product_top_k", "gated_delta", "recurrence")
"""The kernels of the keys, and the folders from which they import."""
_CHOICES: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "product_top_k": (_chosen_selection, ("product_top_k",)),
    "key_scan": (_chosen_keys, _KEYS),
    "value_scan": (_chosen_rows, ("slot_read", "slot_add")),
    "chunk_gated_delta_rule": (
        partial(_chosen, gated_delta.COMPARISON, "float32"),
        ("gated_delta", "recurrence"),
    ),
    "cross_entropy": (partial(_chosen, cross_entropy.COMPARISON, "bfloat16"), ("cross_entropy",)),
    "short_convolution": (
        partial(_chosen, short_convolution.COMPARISON, "float32"),
        ("short_convolution",),
    ),
    "add_rms_norm": (partial(_chosen, add_rms_norm.COMPARISON, "bfloat16"), ("add_rms_norm",)),
    "mix_rms_norm": (partial(_chosen, mix_rms_norm.COMPARISON, "bfloat16"), ("mix_rms_norm",)),
    "embed": (partial(_chosen, embed.COMPARISON, "float32"), ("embed", "slot_add", "slot_read")),
}
"""Operations that models ask for by `auto`, with their folders: their check before first use runs
as users run it."""


def _named(specs: Sequence[Any], name: str) -> Any:
    return next(spec for spec in specs if spec.name == name)
