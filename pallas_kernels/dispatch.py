"""Chooses the implementation of an operation: its kernel for this device, or plain JAX.

The choice is made while tracing, so compiled functions contain one implementation only. Each kernel
is compared with the reference before its first use, once per operation and kind of device.
`pallas_kernels.verdicts` describes where that happens and how long the verdict is kept.
"""

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import jax

from pallas_kernels import verdicts
from pallas_kernels.verdicts import Verdict

REFERENCE_VARIABLE = "PALLAS_KERNELS_REFERENCE"
"""Environment variable with a comma-separated list of operations for which `auto` means
`reference`, such as `value_scan,chunk_gated_delta_rule`."""
Backend = Literal["auto", "reference", "pallas"]
Kernel = Literal["gpu", "tpu", "tpu_sparse_core"]
Implementation = Literal["reference", "gpu", "tpu", "tpu_sparse_core"]

_LOGGER = logging.getLogger("pallas_kernels")
_KERNELS_OF_PLATFORM: dict[str, tuple[Kernel, ...]] = {
    "gpu": ("gpu",),
    "cuda": ("gpu",),
    "tpu": ("tpu_sparse_core", "tpu"),
}
"""Kernels of each platform, in the order in which they are tried."""


class _Simulation(NamedTuple):
    """A request for the kernels of another device, to interpret them or only to compile them."""

    kernel: Kernel
    interpreted: bool


# User contexts are part of jit's cache key: a function traced inside one is retraced outside.
_simulation = jax.make_user_context(None)
_default_backend = jax.make_user_context("auto")
_under_check = jax.make_user_context(None)

_checked: dict[tuple[str, Kernel, str], str | None] = {}
_logged: set[tuple[str, str, str]] = set()

decisions: Counter[tuple[str, Implementation, str]] = Counter()
"""How often each (operation, implementation, reason) was chosen in this process."""


def implementation(
    op: str,
    backend: Backend,
    *,
    kernels: Sequence[Kernel] = ("gpu", "tpu"),
    supports: Callable[[Kernel], str | None] | None = None,
    check: Callable[[Kernel], None] | None,
) -> Implementation:
    """The implementation to trace, chosen by platform, request and the inputs that kernels accept.

    `reference` is plain JAX on every platform. `pallas` is this platform's kernel or an error.
    `auto` is the kernel if it accepts these inputs and agrees with the reference on this device;
    otherwise it is the reference, and one logged line gives the reason. `auto` is also the
    reference for operations that the environment variable `PALLAS_KERNELS_REFERENCE` names. If the
    first kernel of a platform is refused and it has a second one, that is tried next, with a logged
    line.

    Args:
      op: name of the operation, for messages.
      backend: the request; `auto` can be redirected by `default_backend`.
      kernels: the kernels that the operation has.
      supports: returns None, or why the given kernel does not accept these shapes and dtypes.
      check: runs the given kernel on small inputs and raises if it differs from the reference;
        called once per operation, kernel and kind of device, on a GPU in a separate process.

    Raises:
      ValueError: `pallas` where no kernel exists for the platform, or an unknown backend.
      NotImplementedError: `pallas` with inputs that the kernel does not accept.
      RuntimeError: `pallas` with a kernel that disagrees with the reference on this device.
    """
    if backend not in ("auto", "reference", "pallas"):
        raise ValueError(f"backend={backend!r} must be 'auto', 'reference' or 'pallas'.")
    by_name = backend == "pallas"
    if backend == "auto":
        if op in os.environ.get(REFERENCE_VARIABLE, "").split(","):
            return _decided(op, "reference", f"by {REFERENCE_VARIABLE}")
        backend = _default_backend.value
    if backend == "reference":
        return _decided(op, "reference", "by request")
    if _under_check.value is not None:
        return _decided(op, _under_check.value, "under check")

    platform = jax.default_backend()
    here = _kernels_here(platform)
    tried: list[Kernel] = [kernel for kernel in here if kernel in kernels]
    if not by_name and not tried and (here or backend == "auto"):
        return _fall_back(op, f"no kernels for {[*here, platform][0]}", logging.INFO)
    if not tried:
        raise ValueError(
            f"{op}: backend='pallas' has no kernel for platform {platform!r}; use 'auto' or "
            "'reference', or run inside pallas_kernels.dispatch.interpret_kernels('tpu')."
        )
    refusal = None
    for kernel in tried:
        if refusal is not None:
            _log_once(op, f"its {kernel} kernel", *refusal[1:])
        refusal = _refusal(op, kernel, supports, check)
        if refusal is None:
            return _decided(op, kernel, "chosen")
    assert refusal is not None
    error, reason, _ = refusal
    if by_name:
        raise error(f"{op}: {reason}.")
    return _fall_back(op, reason, logging.WARNING)


def _kernels_here(platform: str) -> tuple[Kernel, ...]:
    """The platform's kernels, or those of the simulated device, in the order to try them."""
    simulation: _Simulation | None = _simulation.value
    if simulation is None:
        return _KERNELS_OF_PLATFORM.get(platform, ())
    # An operation without a kernel for SparseCores uses its kernel for TensorCores.
    return (
        ("tpu_sparse_core", "tpu")
        if simulation.kernel == "tpu_sparse_core"
        else (simulation.kernel,)
    )


def _refusal(
    op: str,
    kernel: Kernel,
    supports: Callable[[Kernel], str | None] | None,
    check: Callable[[Kernel], None] | None,
) -> tuple[type[Exception], str, int] | None:
    """None, or the error, the reason and the log level if a kernel cannot run here."""
    simulated = _simulation.value is not None
    lacking = None if simulated else _device_lacks(kernel)
    if lacking is not None:
        level = logging.INFO if kernel == "tpu_sparse_core" else logging.WARNING
        return NotImplementedError, f"the {kernel} kernel does not take {lacking}", level
    refused = None if supports is None else supports(kernel)
    if refused is not None:
        return NotImplementedError, f"the {kernel} kernel does not take {refused}", logging.WARNING
    failure = None if simulated or check is None else _failure(op, kernel, check)
    if failure is not None:
        reason = f"the {kernel} kernel failed its check on this device: {failure}"
        return RuntimeError, reason, logging.WARNING
    return None


def interpreted() -> bool:
    """Whether kernels that are traced now will run in Pallas's interpreter."""
    return _simulation.value is not None and _simulation.value.interpreted


def gpu_interpreter() -> Any:
    """The `interpret` argument of `plgpu.kernel`: Mosaic GPU's interpreter in tests, else None."""
    if not interpreted():
        return None
    # TODO: import from jax.experimental.pallas.mosaic_gpu once jax 0.10 is dropped.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


@contextlib.contextmanager
def interpret_kernels(kernel: Kernel) -> Iterator[None]:
    """Interprets the kernels written for `kernel` on any platform; for tests."""
    with _simulation(_Simulation(kernel, interpreted=True)):
        yield


@contextlib.contextmanager
def compile_kernels(kernel: Kernel) -> Iterator[None]:
    """Traces one kind of kernel regardless of the device.

    Used to compile ahead of time for an absent device, and to measure or test a kernel that would
    not be chosen on this device.
    """
    with _simulation(_Simulation(kernel, interpreted=False)):
        yield


@contextlib.contextmanager
def checked_anew() -> Iterator[None]:
    """Clears the records of checked kernels and logged lines, and restores them afterwards.

    Inside, each kernel is compared with the reference again before its first use.
    """
    checked, logged = dict(_checked), set(_logged)
    _checked.clear()
    _logged.clear()
    try:
        yield
    finally:
        _checked.clear()
        _checked.update(checked)
        _logged.clear()
        _logged.update(logged)


@contextlib.contextmanager
def default_backend(backend: Backend) -> Iterator[None]:
    """Makes `auto` mean `reference`, or `pallas` for inputs that a kernel accepts.

    Inputs that a kernel does not accept still use the reference, with a logged line; they are an
    error only if the caller passes `backend="pallas"`.
    """
    with _default_backend(backend):
        yield


def _device_lacks(kernel: Kernel) -> str | None:
    """None, or why no kernel of this kind compiles for this device."""
    device = jax.devices()[0]
    if kernel == "tpu":
        return None
    if kernel == "tpu_sparse_core":
        return None if _has_sparse_core() else f"a {device.device_kind}, which has no SparseCore"
    capability = getattr(device, "compute_capability", "unknown")
    # The kernels use wgmma and swizzled TMA layouts that only sm_90a has.
    return None if capability == "9.0" else f"compute capability {capability}, only Hopper's 9.0"


def _has_sparse_core() -> bool:
    from jax.experimental.pallas import tpu as pltpu

    try:
        return pltpu.get_tpu_info().sparse_core is not None
    except ValueError:  # A chip that this JAX does not know.
        return False


def _failure(op: str, kernel: Kernel, check: Callable[[Kernel], None]) -> str | None:
    """None, or why the kernel failed its check on this device. The check runs once."""
    kind = jax.devices()[0].device_kind
    place = (op, kernel, kind)
    if place not in _checked:

        def run() -> Verdict:
            if kernel == "gpu" and verdicts.has_name(check):
                _LOGGER.warning(
                    "%s: its kernel is compared with plain JAX on this %s, once for each version; "
                    "this takes a minute or two.",
                    *(op, kind),
                )
                return verdicts.run_apart(check, kernel, kind)
            # A new thread starts outside every trace. Inside `jax.ensure_compile_time_eval`
            # kernels cannot be traced, because their axes are unbound there.
            with ThreadPoolExecutor(max_workers=1) as thread:
                return thread.submit(checked_here, check, kernel).result()

        _checked[place] = verdicts.verdict(check, kernel, kind, run).failure
    return _checked[place]


def checked_here(check: Callable[[Kernel], None], kernel: Kernel) -> Verdict:
    """The verdict of a check that runs in this process and outside every trace.

    Inside the check the operation uses the kernel without another check.
    """
    try:
        with _under_check(kernel):
            check(kernel)
    except Exception as error:  # Any error: the reference can be used instead.
        lasting = "RESOURCE_EXHAUSTED" not in str(error)
        return Verdict(f"{type(error).__name__}: {_one_line(error)}", lasting)
    return Verdict(None)


def _one_line(error: Exception) -> str:
    """The first line of an error's message that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _fall_back(op: str, reason: str, level: int) -> Implementation:
    _log_once(op, "its reference", reason, level)
    return _decided(op, "reference", reason)


def _log_once(op: str, runs: str, reason: str, level: int) -> None:
    if (op, runs, reason) not in _logged:
        _logged.add((op, runs, reason))
        _LOGGER.log(level, "%s runs %s: %s.", op, runs, reason)


def _decided(op: str, chosen: Implementation, reason: str) -> Implementation:
    decisions[op, chosen, reason] += 1
    return chosen
