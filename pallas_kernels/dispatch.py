"""Chooses the implementation of an operation: its kernel for this device, or plain JAX.

The choice is made while tracing, so compiled functions contain one implementation only. Each kernel
is compared with the reference before its first use, once per operation and kind of device.
`pallas_kernels.verdicts` describes where that happens and how long the verdict is kept.
"""

import contextlib
import importlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import jax

from fwpkm_jax.core.platform import compiled_for
from pallas_kernels import verdicts
from pallas_kernels.verdicts import Verdict

REFERENCE_VARIABLE = "PALLAS_KERNELS_REFERENCE"
"""Environment variable with a comma-separated list of operations for which `auto` means
`reference`, such as `value_scan,chunk_gated_delta_rule`."""
Backend = Literal["auto", "reference", "pallas"]
Kernel = Literal["gpu", "tpu"]
Implementation = Literal["reference", "gpu", "tpu"]

_LOGGER = logging.getLogger("pallas_kernels")
_KERNEL_OF_PLATFORM: dict[str, Kernel] = {"gpu": "gpu", "cuda": "gpu", "tpu": "tpu"}


class _Simulation(NamedTuple):
    """A request for the kernels of another device, to interpret them or only to compile them."""

    kernel: Kernel
    interpreted: bool


# User contexts are part of jit's cache key: a function traced inside one is retraced outside.
_simulation = jax.make_user_context(None)
_default_backend = jax.make_user_context("auto")
_under_check = jax.make_user_context(None)

_checked: dict[tuple[str, Kernel, str], str | None] = {}
_logged: set[tuple[str, str]] = set()

decisions: Counter[tuple[str, Implementation, str]] = Counter()
"""How often each (operation, implementation, reason) was chosen in this process."""


def implementation(
    op: str,
    backend: Backend,
    *,
    kernels: Sequence[Kernel] = ("gpu", "tpu"),
    supports: Callable[[Kernel], str | None] | None = None,
    check: Callable[[Kernel], None] | None,
    uses: Sequence[str] = (),
) -> Implementation:
    """The implementation to trace, chosen by platform, request and the inputs that kernels accept.

    `reference` is plain JAX on every platform. `pallas` is this platform's kernel or an error.
    `auto` is the kernel if it accepts these inputs and agrees with the reference on this device;
    otherwise it is the reference, and one logged line gives the reason. `auto` is also the
    reference for operations that the environment variable `PALLAS_KERNELS_REFERENCE` names.

    Args:
      op: name of the operation, for messages.
      backend: the request; `auto` can be redirected by `default_backend`.
      kernels: the kernels that the operation has.
      supports: returns None, or why the given kernel does not accept these shapes and dtypes.
      check: runs the given kernel on small inputs and raises if it differs from the reference;
        called once per operation, kernel and kind of device, on a GPU in a separate process.
      uses: other operations whose kernels this one's contain; `PALLAS_KERNELS_REFERENCE` may name
        any of them.

    Raises:
      ValueError: `pallas` where no kernel exists for the platform, or an unknown backend.
      NotImplementedError: `pallas` with inputs that the kernel does not accept.
      RuntimeError: `pallas` with a kernel that disagrees with the reference on this device.
    """
    if backend not in ("auto", "reference", "pallas"):
        raise ValueError(f"backend={backend!r} must be 'auto', 'reference' or 'pallas'.")
    by_name = backend == "pallas"
    if backend == "auto":
        if {op, *uses} & set(os.environ.get(REFERENCE_VARIABLE, "").split(",")):
            return _decided(op, "reference", f"by {REFERENCE_VARIABLE}")
        backend = _default_backend.value
    if backend == "reference":
        return _decided(op, "reference", "by request")
    if _under_check.value is not None:
        return _decided(op, _under_check.value, "under check")

    platform, simulation = jax.default_backend(), _simulation.value
    kernel = _KERNEL_OF_PLATFORM.get(platform) if simulation is None else simulation.kernel
    if kernel is None or kernel not in kernels:
        if by_name or (kernel is None and backend == "pallas"):
            raise ValueError(
                f"{op}: backend='pallas' has no kernel for platform {platform!r}; use 'auto' or "
                "'reference', or run inside pallas_kernels.dispatch.interpret_kernels('tpu')."
            )
        reason = f"no kernels for {kernel or platform}"
        return _decided(op, "reference", reason, log_level=logging.INFO)
    refusal = _refusal(op, kernel, supports, check)
    if refusal is None:
        return _decided(op, kernel, "chosen")
    error, reason = refusal
    if by_name:
        raise error(f"{op}: {reason}.")
    return _decided(op, "reference", reason, log_level=logging.WARNING)


def module_of(folder: str, kernel: Kernel) -> Any:
    """The module of one device's kernels in an operation's folder; loaded only when chosen."""
    return importlib.import_module(f"pallas_kernels.{folder}.{kernel}")


def _refusal(
    op: str,
    kernel: Kernel,
    supports: Callable[[Kernel], str | None] | None,
    check: Callable[[Kernel], None] | None,
) -> tuple[type[Exception], str] | None:
    """None, or the error and the reason if a kernel cannot run here."""
    simulated = _simulation.value is not None
    lacking = None if simulated else _device_lacks(kernel)
    if lacking is None and supports is not None:
        lacking = supports(kernel)
    if lacking is not None:
        return NotImplementedError, f"the {kernel} kernel does not take {lacking}"
    failure = None if simulated or check is None else _failure(op, kernel, check)
    if failure is not None:
        return RuntimeError, f"the {kernel} kernel failed its check on this device: {failure}"
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
    with _simulation(_Simulation(kernel, interpreted=False)), compiled_for(kernel):
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
    if kernel == "tpu":
        return None
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    # The kernels use wgmma and swizzled TMA layouts that only sm_90a has.
    return None if capability == "9.0" else f"compute capability {capability}, only Hopper's 9.0"


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
                    op,
                    kind,
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


def _decided(
    op: str, chosen: Implementation, reason: str, *, log_level: int | None = None
) -> Implementation:
    """Counts a decision; with `log_level` also logs it, the same one once in a process."""
    decisions[op, chosen, reason] += 1
    if log_level is not None and (op, reason) not in _logged:
        _logged.add((op, reason))
        _LOGGER.log(log_level, "%s runs its %s: %s.", op, chosen, reason)
    return chosen
