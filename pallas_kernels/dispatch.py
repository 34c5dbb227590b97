"""Chooses the implementation of an operation: its kernel for this device, or plain JAX.

The choice is made while tracing, so compiled functions contain one implementation only. Each kernel
is compared with the reference before its first use, once per operation and kind of device.
`pallas_kernels.verdicts` describes where that happens and how long the verdict is kept.

Some operations can also run the kernels of another package, a library. They do so by request only,
with the same comparison before the first use.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, NamedTuple, TypeVar

import jax

from fwpkm_jax.core.platform import compiled_for, platform

REFERENCE_VARIABLE = "PALLAS_KERNELS_REFERENCE"
"""Environment variable with a comma-separated list of operations for which `auto` means
`reference`, such as `value_scan,chunk_gated_delta_rule`."""
R = TypeVar("R")
Backend = Literal["auto", "reference", "pallas"]
Kernel = Literal["gpu", "tpu"]
Library = Literal["jla", "deltanet_tpu"]
AnyBackend = Backend | Library
Implementation = Literal["reference", "gpu", "tpu", "jla", "deltanet_tpu"]

_LOGGER = logging.getLogger("pallas_kernels")
_ALL_KERNELS: tuple[Kernel, ...] = ("gpu", "tpu")
_OWN = ("auto", "reference", "pallas")


class OtherPackage(NamedTuple):
    """A package whose kernels operations may run; the extra of its name installs it."""

    distribution: str
    kernel: Kernel
    """The kind of device that it has kernels for."""


LIBRARIES: dict[str, OtherPackage] = {
    "jla": OtherPackage("jax-linear-attention", "gpu"),
    "deltanet_tpu": OtherPackage("deltanet-tpu", "tpu"),
}
"""Other packages by the name of their module."""


class _Simulation(NamedTuple):
    """A request for the kernels of another device, to interpret them or only to compile them."""

    kernel: Kernel
    interpreted: bool


# User contexts are part of jit's cache key: a function traced inside one is retraced outside.
_simulation = jax.make_user_context(None)
_default_backend = jax.make_user_context("auto")
under_check = jax.make_user_context(None)
"""The kernel that is being checked: operations use it without another check."""

_checked: dict[tuple[str, Implementation, str], str | None] = {}
_logged: set[tuple[str, str]] = set()

decisions: Counter[tuple[str, Implementation, str]] = Counter()
"""How often each (operation, implementation, reason) was chosen in this process."""


@dataclass(frozen=True)
class Operation:
    """An operation that devices have kernels for, what these do not take, and how they are checked.

    Its public function asks `choose`. It computes its definition in plain JAX where the answer is
    `reference`, and calls a device's kernels otherwise. A new operation is one folder: that
    function and its `Operation` in `api.py`, `gpu.py` or `tpu.py`, and named shapes in `specs.py`.

    Attributes:
      name: of the operation, for messages and for `PALLAS_KERNELS_REFERENCE`.
      refuses: `refuses(kernel, *arguments)` returns None, or what the kernel does not take.
      kernels: the kernels that the operation has.
      check: `MODULE:NAME` of what runs the given kernel on small inputs and raises if it differs
        from the reference; called once per operation, kernel and kind of device, on a GPU in a
        separate process. None: the `COMPARISON` of the operation's folder. A function without a
        name is called in this process.
      uses: other operations whose kernels this one's contain; `PALLAS_KERNELS_REFERENCE` may name
        any of them.
      libraries: other packages with kernels for it. `refuses` and `check` get their names in place
        of the kernel's.
    """

    name: str
    refuses: Callable[..., str | None]
    kernels: tuple[Kernel, ...] = _ALL_KERNELS
    check: str | Callable[[Any], None] | None = None
    uses: tuple[str, ...] = ()
    libraries: tuple[Library, ...] = ()

    @property
    def checked_by(self) -> str | Callable[[Any], None]:
        """See `check`."""
        return self.check or f"pallas_kernels.{self.name}.specs:COMPARISON.check"

    def choose(self, backend: AnyBackend, *arguments: Any, **options: Any) -> Implementation:
        """The implementation to trace, chosen by platform, request and the arguments.

        `reference` is plain JAX on every platform. `pallas` is this platform's kernel or an error.
        `auto` is the kernel if it takes these arguments and agrees with the reference on this
        device; otherwise it is the reference, and one logged line gives the reason. `auto` is also
        the reference for operations that the environment variable `PALLAS_KERNELS_REFERENCE` names.
        The name of a library is its kernel or an error, also as the default backend.

        Args:
          backend: the request; `auto` can be redirected by `default_backend`.
          *arguments: what `refuses` looks at.
          **options: the same by name.

        Raises:
          ValueError: `pallas` where no kernel exists for the platform, or an unknown backend.
          ModuleNotFoundError: a library that is not installed.
          NotImplementedError: a kernel asked for by name that does not take the inputs.
          RuntimeError: a kernel asked for by name that disagrees with the reference on this device.
        """
        if backend not in (*_OWN, *self.libraries):
            raise ValueError(f"backend={backend!r} is none of {[*_OWN, *self.libraries]}.")
        # `auto` by the caller may be redirected; a request by name may not.
        wanted = _default_backend.value if backend == "auto" else backend
        in_plain_jax = os.environ.get(REFERENCE_VARIABLE, "").split(",")
        if backend == "auto" and not {self.name, *self.uses}.isdisjoint(in_plain_jax):
            return self._decided("reference", f"by {REFERENCE_VARIABLE}")
        if wanted == "reference":
            return self._decided("reference", "by request")
        # The check runs the public function, which must not start the check again.
        if under_check.value is not None:
            return self._decided(under_check.value, "under check")
        # A simulated device comes before this one, for tests and ahead-of-time compiles.
        kernel = _simulation.value.kernel if _simulation.value else platform()
        kernel = wanted if wanted in self.libraries else kernel
        if kernel in self.kernels or kernel in self.libraries:
            return self._kernel_or_reference(kernel, backend == "pallas", arguments, options)
        if backend == "pallas" or (wanted == "pallas" and kernel not in _ALL_KERNELS):
            raise ValueError(
                f"{self.name}: backend='pallas' has no kernel for platform {kernel!r}; use 'auto' "
                "or 'reference', or run inside pallas_kernels.dispatch.interpret_kernels('tpu')."
            )
        return self._decided("reference", f"no kernels for {kernel}", log_level=logging.INFO)

    def _kernel_or_reference(
        self, kernel: Kernel | Library, by_name: bool, arguments: Any, options: Any
    ) -> Implementation:
        """The kernel if it can run here; otherwise the reference, or an error if asked by name."""
        # A simulated kernel runs nowhere, so no device can refuse or check it.
        simulated = _simulation.value is not None
        # The device first, then the arguments, then the check, which is the slowest.
        lacking = _library_lacks(self.name, kernel) if kernel in LIBRARIES else None
        lacking = lacking or (None if simulated else _device_lacks(_device_of(kernel)))
        lacking = lacking or self.refuses(kernel, *arguments, **options)
        failure = None if simulated or lacking else self._failure(kernel)
        if lacking is None and failure is None:
            return self._decided(kernel, "chosen")
        if lacking is not None:
            error, reason = NotImplementedError, f"does not take {lacking}"
        else:
            error, reason = RuntimeError, f"failed its check on this device: {failure}"
        reason = f"the {kernel} kernel {reason}"
        if by_name or kernel in LIBRARIES:
            raise error(f"{self.name}: {reason}.")
        return self._decided("reference", reason, log_level=logging.WARNING)

    def _failure(self, kernel: Kernel | Library) -> str | None:
        """None, or why the kernel failed its check on this device. The check runs once."""
        # Imported here, because nearly all programs find the verdict without a check, or need none.
        from pallas_kernels import verdicts

        kind = jax.devices()[0].device_kind
        place = (self.name, kernel, kind)
        if place not in _checked:
            check = self.checked_by

            def run() -> verdicts.Verdict:
                if _device_of(kernel) == "gpu" and isinstance(check, str):
                    _LOGGER.warning(
                        "%s: its kernel is compared with plain JAX on this %s, once for each "
                        "version; this takes a minute or two.",
                        self.name,
                        kind,
                    )
                    return verdicts.run_apart(check, kernel, kind)
                # A new thread starts outside every trace. Inside `jax.ensure_compile_time_eval`
                # kernels cannot be traced, because their axes are unbound there.
                with ThreadPoolExecutor(max_workers=1) as thread:
                    checked = importlib.import_module("pallas_kernels.check_here").checked
                    return thread.submit(checked, check, kernel).result()

            # Another version of a library has other kernels.
            shown = f"{kernel} {version(LIBRARIES[kernel][0])}" if kernel in LIBRARIES else kernel
            _checked[place] = verdicts.verdict(check, shown, kind, run).failure
        return _checked[place]

    def _decided(
        self, chosen: Implementation, reason: str, *, log_level: int | None = None
    ) -> Implementation:
        """Counts a decision; with `log_level` also logs it, the same one once in a process."""
        decisions[self.name, chosen, reason] += 1
        if log_level is not None and (self.name, reason) not in _logged:
            _logged.add((self.name, reason))
            _LOGGER.log(log_level, "%s runs its %s: %s.", self.name, chosen, reason)
        return chosen


def module_of(folder: str, name: str) -> Any:
    """A module of an operation's folder, such as a device's kernels; loaded only when chosen."""
    return importlib.import_module(f"pallas_kernels.{folder}.{name}")


def custom_vjp(*, fixed: int) -> Callable[[Callable[..., R]], "jax.custom_vjp[R]"]:
    """A decorator as `jax.custom_vjp`, whose first `fixed` arguments are no arrays."""
    found: Any = functools.partial(jax.custom_vjp, nondiff_argnums=tuple(range(fixed)))
    return found  # Its type says what the function returns.


def run_kernels(kernels: Any, *arrays: Any, **options: Any) -> Any:
    """The results of a device's kernels, with the gradient that their backward pass computes.

    Args:
      kernels: a module with `forward(*arrays, save, **options)`, which returns the results and what
        the backward pass reads, if `save`, and `backward(saved, cotangents, **options)`, which
        returns a cotangent of each array.
      **options: hashable.
    """
    return _run(kernels, tuple(options.items()), *arrays)


@custom_vjp(fixed=2)
def _run(kernels, options, *arrays) -> Any:
    return _traced_once(kernels.forward, (*options, ("save", False)), *arrays)[0]


def _run_forward(kernels, options, *arrays):
    return _traced_once(kernels.forward, (*options, ("save", True)), *arrays)


def _run_backward(kernels, options, saved, cotangents):
    return tuple(_traced_once(kernels.backward, options, saved, cotangents))


_run.defvjp(_run_forward, _run_backward)


# For equal arguments, so that a model lowers its kernels once, not per layer.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _traced_once(function, options, *arrays):
    return function(*arrays, **dict(options))


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


def interpret_kernels(kernel: Kernel) -> AbstractContextManager[None]:
    """A context that interprets the kernels written for `kernel` on any platform; for tests."""
    return _simulation(_Simulation(kernel, interpreted=True))


@contextlib.contextmanager
def compile_kernels(kernel: Kernel) -> Iterator[None]:
    """Traces one kind of kernel regardless of the device.

    Used to compile ahead of time for an absent device, and to measure or test a kernel that would
    not be chosen on this device.
    """
    with _simulation(_Simulation(kernel, interpreted=False)), compiled_for(kernel):
        yield


def default_backend(backend: AnyBackend) -> AbstractContextManager[None]:
    """A context in which `auto` means `reference`, or `pallas` for inputs that a kernel accepts.

    Inputs that a kernel does not accept still use the reference, with a logged line; they are an
    error only if the caller passes `backend="pallas"`. Of a library, operations that it has kernels
    for run these or raise; other operations are not changed.
    """
    return _default_backend(backend)


def _device_of(kernel: Kernel | Library) -> str:
    """The kind of device that a kernel is for."""
    return LIBRARIES[kernel].kernel if kernel in LIBRARIES else kernel


def _library_lacks(operation: str, name: str) -> str | None:
    """None, or why this device cannot run the kernels of another package.

    Raises:
      ModuleNotFoundError: it is not installed.
    """
    distribution, kernel = LIBRARIES[name]
    if importlib.util.find_spec(name) is None:
        raise ModuleNotFoundError(
            f"{operation}: backend={name!r} needs the package {distribution}, which is not "
            f"installed; the extra {name.replace('_', '-')} of fwpkm_jax brings it. Or use 'auto'."
        )
    if interpreted():
        return "the interpreter"
    found = platform()
    return None if found == kernel else f"platform {found!r}, only {kernel!r}"


def _device_lacks(kernel: str) -> str | None:
    """None, or why no kernel of this kind compiles for this device."""
    if kernel == "tpu":
        return None
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    # The kernels use wgmma and swizzled TMA layouts that only sm_90a has.
    return None if capability == "9.0" else f"compute capability {capability}, only Hopper's 9.0"
