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
from fwpkm_jax.core.slots.write import KeyWrite
from fwpkm_jax.rules import FwPKM, FwPKMMemory
from pallas_kernels import dispatch
from pallas_kernels.add_rms_norm import api as add_rms_norm
from pallas_kernels.add_rms_norm import specs as add_rms_norm_specs
from pallas_kernels.checks import relative_errors, results_of
from pallas_kernels.cross_entropy import api as cross_entropy
from pallas_kernels.cross_entropy import specs as cross_entropy_specs
from pallas_kernels.dispatch import Backend, Kernel
from pallas_kernels.embed import api as embed
from pallas_kernels.embed import specs as embed_specs
from pallas_kernels.gated_delta import api as gated_delta
from pallas_kernels.gated_delta import specs as gated_delta_specs
from pallas_kernels.key_scan import api as key_scan
from pallas_kernels.key_scan import specs as key_scan_specs
from pallas_kernels.mix_rms_norm import api as mix_rms_norm
from pallas_kernels.mix_rms_norm import specs as mix_rms_norm_specs
from pallas_kernels.product_top_k import api as product_top_k
from pallas_kernels.product_top_k import specs as product_top_k_specs
from pallas_kernels.row_ops import row_ops
from pallas_kernels.short_convolution import api as short_convolution
from pallas_kernels.short_convolution import specs as short_convolution_specs
from pallas_kernels.slot_add import specs as slot_add_specs
from pallas_kernels.slot_add.api import add_logged
from pallas_kernels.slot_read import specs as slot_read_specs
from pallas_kernels.slot_read.api import slot_dot, slot_read

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
    names = ("63_tokens",) if tiny else (*slot_read_specs.CHECKED, "paper")
    for op, function, sample in (
        ("slot_read", slot_read, slot_read_specs.sample),
        ("slot_dot", slot_dot, slot_read_specs.sample_dot),
        ("slot_add", add_logged, slot_add_specs.sample),
    ):
        for name in names:
            spec = _named(slot_read_specs.SPECS, name)
            found[f"{op}/{name}"] = Case(
                run=lambda function=function, sample=sample, spec=spec: _compare(
                    function, sample(spec, jnp.float32)
                ),
                ratio=slot_read_specs.CHECK_RATIO,
                folders=("slot_read", "slot_add"),
            )
    for name in ("narrow",) if tiny else (gated_delta_specs.CHECKED, "wide", "widest"):
        spec = _named(gated_delta_specs.SPECS, name)
        for dtype, ratio in gated_delta_specs.CHECK_RATIOS.items():
            found[f"chunk_gated_delta_rule/{name}/{dtype}"] = Case(
                run=lambda spec=spec, dtype=dtype: _compare(
                    gated_delta.chunk_gated_delta_rule,
                    gated_delta_specs.sample(spec, jnp.dtype(dtype)),
                ),
                ratio=ratio,
                folders=("gated_delta",),
                heavy=name in ("wide", "widest"),
            )
    for name in ("one_group",) if tiny else ("tiles_and_rest", "100_tokens", "widest", "paper"):
        spec = _named(cross_entropy_specs.SPECS, name)
        for dtype, ratio in cross_entropy_specs.CHECK_RATIOS.items():
            found[f"cross_entropy/{name}/{dtype}"] = Case(
                run=lambda spec=spec, dtype=dtype: _compare(
                    partial(cross_entropy.row_cross_entropy, dtype=jnp.dtype(dtype)),
                    cross_entropy_specs.sample(spec),
                    fixed=("logits", "weights"),
                ),
                ratio=ratio,
                folders=("cross_entropy",),
            )
    for name in ("packed",) if tiny else short_convolution_specs.ON_DEVICE:
        spec = _named(short_convolution_specs.SPECS, name)
        for dtype, ratio in short_convolution_specs.CHECK_RATIOS.items():
            found[f"short_convolution/{name}/{dtype}"] = Case(
                run=lambda spec=spec, dtype=dtype: _convolution(spec, dtype),
                ratio=ratio,
                folders=("short_convolution",),
            )
    for name in ("one_token",) if tiny else ("100_tokens", "widest", "paper", "paper_alone"):
        spec = _named(add_rms_norm_specs.SPECS, name)
        for dtype, ratio in add_rms_norm_specs.CHECK_RATIOS.items():
            found[f"add_rms_norm/{name}/{dtype}"] = Case(
                run=lambda spec=spec, dtype=dtype: _compare(
                    partial(add_rms_norm.add_rms_norm, eps=spec.eps),
                    add_rms_norm_specs.sample(spec, jnp.dtype(dtype)),
                ),
                ratio=ratio,
                folders=("add_rms_norm",),
            )
    for name in ("one_token",) if tiny else ("100_tokens", "widest", "paper"):
        spec = _named(mix_rms_norm_specs.SPECS, name)
        for dtype, ratio in mix_rms_norm_specs.CHECK_RATIOS.items():
            found[f"mix_rms_norm/{name}/{dtype}"] = Case(
                run=lambda spec=spec, dtype=dtype: _compare(
                    mix_rms_norm.op_of(spec, dtype), mix_rms_norm_specs.sample(spec, dtype)
                ),
                ratio=ratio,
                folders=("mix_rms_norm",),
            )
    for name in ("one_token",) if tiny else ("one_often", "100_tokens", "paper"):
        spec = _named(embed_specs.SPECS, name)
        found[f"embed/{name}"] = Case(
            run=lambda spec=spec: _compare(embed.embed, embed_specs.sample(spec, jnp.float32)),
            ratio=embed_specs.CHECK_RATIO,
            folders=("embed", "slot_add", "slot_read"),
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


def _convolution(spec: short_convolution_specs.ConvolutionSpec, dtype: str) -> dict[str, Any]:
    call = short_convolution.compared(spec, jnp.dtype(dtype))
    return _compare(call, short_convolution_specs.sample(spec, jnp.dtype(dtype)), on_cpu="gpu")


def _selection(spec: product_top_k_specs.TopKSpec) -> dict[str, Any]:
    arrays = product_top_k_specs.sample(spec, jnp.float32)

    @jax.jit
    def select(queries: jax.Array, keys: jax.Array) -> Any:
        return product_top_k.select_slots(
            queries, keys, top_k=spec.top_k, score=spec.score, backend="pallas"
        )

    kernel, context = _kernels()
    with context:
        errors = product_top_k.selection_errors(kernel, spec, arrays)
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
    ways = (key_scan.loops_of(one, spec.top_k) for one in (kernel, "reference"))
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
    key_scan.key_loops(keys, queries, top_k=8, key_write=write)
    return {}


def _chosen_rows() -> dict[str, Any]:
    row_ops(jnp.zeros((256, 512), jnp.float32))
    return {}


def _chosen_rule() -> dict[str, Any]:
    spec = _named(gated_delta_specs.SPECS, "one_token")
    arrays: dict[str, Any] = gated_delta_specs.sample(spec, jnp.float32)
    gated_delta.chunk_gated_delta_rule(**arrays)
    return {}


def _chosen_losses() -> dict[str, Any]:
    arrays: dict[str, Any] = cross_entropy_specs.sample(
        _named(cross_entropy_specs.SPECS, "one_group")
    )
    cross_entropy.row_cross_entropy(**arrays, dtype=jnp.bfloat16)
    return {}


def _chosen_convolution() -> dict[str, Any]:
    spec = _named(short_convolution_specs.SPECS, "one_token")
    arrays: dict[str, Any] = short_convolution_specs.sample(spec, jnp.float32)
    short_convolution.short_convolution(**arrays, parts=spec.parts)
    return {}


def _chosen_norms() -> dict[str, Any]:
    spec = _named(add_rms_norm_specs.SPECS, "one_token")
    arrays: dict[str, Any] = add_rms_norm_specs.sample(spec, jnp.bfloat16)
    add_rms_norm.add_rms_norm(**arrays, eps=spec.eps)
    return {}


def _chosen_mixes() -> dict[str, Any]:
    spec = _named(mix_rms_norm_specs.SPECS, "one_token")
    arrays = mix_rms_norm_specs.sample(spec, jnp.bfloat16)
    mix_rms_norm.op_of(spec, "bfloat16")(**arrays)
    return {}


def _chosen_embedding() -> dict[str, Any]:
    arrays: dict[str, Any] = embed_specs.sample(_named(embed_specs.SPECS, "one_token"), jnp.float32)
    embed.embed(**arrays)
    return {}


_KEYS = ("key_scan", "product_top_k", "gated_delta")
"""The kernels of the keys, and the folders from which they import."""
_CHOICES: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "product_top_k": (_chosen_selection, ("product_top_k",)),
    "key_scan": (_chosen_keys, _KEYS),
    "value_scan": (_chosen_rows, ("slot_read", "slot_add")),
    "chunk_gated_delta_rule": (_chosen_rule, ("gated_delta",)),
    cross_entropy.OP: (_chosen_losses, ("cross_entropy",)),
    "short_convolution": (_chosen_convolution, ("short_convolution",)),
    add_rms_norm.OP: (_chosen_norms, ("add_rms_norm",)),
    mix_rms_norm.OP: (_chosen_mixes, ("mix_rms_norm",)),
    embed.OP: (_chosen_embedding, ("embed", "slot_add", "slot_read")),
}
"""Operations that models ask for by `auto`, with their folders: their check before first use runs
as users run it."""


def _named(specs: Sequence[Any], name: str) -> Any:
    return next(spec for spec in specs if spec.name == name)
