"""Which implementation of an operation runs: its kernel for this device, or plain JAX.

The choice is made while tracing, so a compiled function never decides anything. Kernels are
checked once per operation and kind of device against the reference before they are trusted.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import jax

Backend = Literal["auto", "reference", "pallas"]
Kernel = Literal["gpu", "tpu"]
Implementation = Literal["reference", "gpu", "tpu"]

_LOGGER = logging.getLogger("pallas_kernels")
_KERNEL_OF_PLATFORM: dict[str, Kernel] = {"gpu": "gpu", "cuda": "gpu", "tpu": "tpu"}


class _Simulation(NamedTuple):
    """Kernels asked for where their device is not: run by interpretation, or only compiled."""

    kernel: Kernel
    interpreted: bool


# User contexts are part of jit's cache key: a function traced inside one is traced anew outside.
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
    supports: Callable[[Kernel], str | None] | None = None,
    check: Callable[[Kernel], None] | None,
) -> Implementation:
    """The implementation to trace, by the platform, the request and what the kernels can do.

    `reference` is plain JAX everywhere. `pallas` is this platform's kernel or an error. `auto` is
    the kernel where there is one that takes these inputs and agrees with the reference on this
    device, else the reference, with one logged line that says why.

    Args:
      op: name of the operation, for messages.
      backend: the request; `auto` can be redirected by `default_backend`.
      supports: given a kernel, None or why it does not take these shapes and dtypes.
      check: given a kernel, runs it eagerly on small inputs and raises where it differs from the
        reference; called once per operation and kind of device.

    Raises:
      ValueError: `pallas` where no kernel exists for the platform, or an unknown backend.
      NotImplementedError: `pallas` with inputs that the kernel does not take.
      RuntimeError: `pallas` with a kernel that disagrees with the reference on this device.
    """
    if backend not in ("auto", "reference", "pallas"):
        raise ValueError(f"backend={backend!r} must be 'auto', 'reference' or 'pallas'.")
    by_name = backend == "pallas"
    if backend == "auto":
        backend = _default_backend.value
    if backend == "reference":
        return _decided(op, "reference", "by request")

    simulation: _Simulation | None = _simulation.value
    platform = jax.default_backend()
    kernel = _KERNEL_OF_PLATFORM.get(platform) if simulation is None else simulation.kernel
    if simulation is None and backend == "auto" and kernel is None:
        return _fall_back(op, f"no kernels for {platform}", logging.INFO)
    if _under_check.value is not None:
        return _decided(op, _under_check.value, "under check")
    if kernel is None:
        raise ValueError(
            f"{op}: backend='pallas' has no kernel for platform {platform!r}; use 'auto' or "
            "'reference', or run inside pallas_kernels.dispatch.interpret_kernels('tpu')."
        )

    reason = _device_too_old(kernel) if simulation is None else None
    if reason is None and supports is not None:
        reason = supports(kernel)
    if reason is not None:
        if by_name:
            raise NotImplementedError(f"{op}: the {kernel} kernel does not take {reason}.")
        return _fall_back(op, f"the {kernel} kernel does not take {reason}", logging.WARNING)
    if simulation is None and check is not None:
        failure = _failure(op, kernel, check)
        if failure is not None:
            message = f"the {kernel} kernel failed its check on this device: {failure}"
            if by_name:
                raise RuntimeError(f"{op}: {message}")
            return _fall_back(op, message, logging.WARNING)
    return _decided(op, kernel, "chosen")


def interpreted() -> bool:
    """Whether kernels traced now are to be run by Pallas's interpreter, on any platform."""
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
    """Runs the kernels written for `kernel` by interpretation, wherever this is; for tests."""
    with _simulation(_Simulation(kernel, interpreted=True)):
        yield


@contextlib.contextmanager
def compile_kernels(kernel: Kernel) -> Iterator[None]:
    """Traces the kernels of a device that is not here, to compile them ahead of time."""
    with _simulation(_Simulation(kernel, interpreted=False)):
        yield


@contextlib.contextmanager
def default_backend(backend: Backend) -> Iterator[None]:
    """Redirects `auto`: to `reference`, or to `pallas`, whose kernels then run where they can.

    Inputs that a kernel does not take still go to the reference with a logged line: only a caller
    that names `pallas` itself asks for an error.
    """
    with _default_backend(backend):
        yield


def _device_too_old(kernel: Kernel) -> str | None:
    """Why no kernel of this kind compiles for the device at hand, or None."""
    if kernel == "tpu":
        return None
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    # wgmma and TMA's swizzled layouts, as written here, are sm_90a's alone.
    return None if capability == "9.0" else f"compute capability {capability}, only Hopper's 9.0"


def _failure(op: str, kernel: Kernel, check: Callable[[Kernel], None]) -> str | None:
    """Why the kernel cannot be trusted on this device, or None; found once."""
    place = (op, kernel, jax.devices()[0].device_kind)
    if place not in _checked:
        try:
            # A thread of its own begins outside every trace. `jax.ensure_compile_time_eval` would
            # evaluate, too, but kernels cannot be traced inside it: their axes are unbound.
            with ThreadPoolExecutor(max_workers=1) as thread:
                thread.submit(_run_check, kernel, check).result()
            _checked[place] = None
        except Exception as error:  # Whatever breaks, the reference still works.
            _checked[place] = f"{type(error).__name__}: {error}"
    return _checked[place]


def _run_check(kernel: Kernel, check: Callable[[Kernel], None]) -> None:
    """Checks a kernel, which the operation's own function then runs without a further check."""
    with _under_check(kernel):
        check(kernel)


def _fall_back(op: str, reason: str, level: int) -> Implementation:
    if (op, reason) not in _logged:
        _logged.add((op, reason))
        _LOGGER.log(level, "%s runs its reference: %s.", op, reason)
    return _decided(op, "reference", reason)


def _decided(op: str, chosen: Implementation, reason: str) -> Implementation:
    decisions[op, chosen, reason] += 1
    return chosen
