"""The processes that train one model together, each with its own devices.

JAX's distributed runtime connects them. The functions here tell every process that another one
failed or received a stop signal, and what the first process found in the run directory.
"""

import contextlib
import ctypes
import functools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fwpkm_jax.literals import Count, check_fields
from fwpkm_jax.storage.repeated import Repeated

# How long a process that ends waits for the others before the runtime ends them all.
_LEAVING_SECONDS = 30
_LONGEST_MESSAGE = 1000
_WAITING_LINE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How the processes of a run find each other; the default is a single process."""

    detect: bool = False
    """JAX asks the cluster that started the processes: Slurm, Open MPI or Cloud TPU."""
    coordinator: str | None = None
    """HOST:PORT at which the other processes reach process 0; the port must be free there."""
    num_processes: Count | None = None
    """Number of processes of the run; each uses all devices that it sees."""
    process_id: int | None = None
    """Number of this process, counted from 0."""

    def __post_init__(self) -> None:
        check_fields(self)
        named = (self.coordinator, self.num_processes, self.process_id)
        if self.detect and named != (None, None, None):
            raise ValueError(
                f"detect=True asks the cluster for coordinator={self.coordinator}, num_processes="
                f"{self.num_processes} and process_id={self.process_id}; leave them out."
            )
        if None in named and named != (None, None, None):
            raise ValueError(
                f"coordinator={self.coordinator}, num_processes={self.num_processes} and process_id"
                f"={self.process_id} belong together; give all three, or none."
            )
        if self.coordinator is not None and not self.coordinator.rpartition(":")[2].isdecimal():
            raise ValueError(f"coordinator={self.coordinator!r} must be HOST:PORT.")
        count, number = self.num_processes, self.process_id
        if count is not None and number is not None and not 0 <= number < count:
            raise ValueError(
                f"process_id={number} must be one of the {count} processes, 0 to {count - 1}."
            )


class OtherProcessError(RuntimeError):
    """Another process of the run failed; the message says which one, and its error."""


LOST = (
    "Another process of this run may have failed first; its own message names the cause. The same "
    "commands continue the run from its newest checkpoint."
)


def connect(
    config: DistributedConfig, *, say: Callable[[str], None] = lambda line: None, program: str = ""
) -> None:
    """Joins the run's other processes. Call it before any other use of JAX.

    With the default configuration it does nothing.

    Args:
      config: who they are.
      say: prints a line; while this process waits, it says for whom and where.
      program: once JAX's runtime finds that another process is gone, it aborts this one. A
        program's name: this process then ends with `LOST` as its last line and exit code 1.

    Raises:
      ValueError: `detect` found no cluster.
      RuntimeError: the other processes did not connect in time.
    """
    if config.coordinator is not None:
        with _said_while_waiting(_whom(config), say), _ends_in_a_line(program):
            jax.distributed.initialize(
                config.coordinator,
                config.num_processes,
                config.process_id,
                cluster_detection_method="deactivate",
                shutdown_timeout_seconds=_LEAVING_SECONDS,
            )
    elif config.detect:
        whom = "This process waits for the others that its cluster started"
        try:
            with _said_while_waiting(whom, say), _ends_in_a_line(program):
                jax.distributed.initialize(shutdown_timeout_seconds=_LEAVING_SECONDS)
        except ValueError as error:
            raise ValueError(
                f"distributed.detect found no cluster that started this process ({error}); give "
                "distributed.coordinator, num_processes and process_id."
            ) from error


def _whom(config: DistributedConfig) -> str:
    """For whom a process waits, and where."""
    count, mine = config.num_processes or 1, config.process_id or 0
    if mine:
        return f"Process {mine} of {count} waits for process 0 at {config.coordinator}"
    others = "process 1" if count == 2 else f"processes 1 to {count - 1}"
    return f"Process 0 of {count} waits for {others} at {config.coordinator}"


@contextlib.contextmanager
def _said_while_waiting(whom: str, say: Callable[[str], None]) -> Iterator[None]:
    began = time.monotonic()

    def repeat() -> None:
        say(
            f"{whom}, for {time.monotonic() - began:.0f} s now; each process is started with "
            "the same command and its own --distributed.process_id."
        )

    with Repeated(repeat, _WAITING_LINE_SECONDS, name="waiting"):
        yield


@contextlib.contextmanager
def _ends_in_a_line(program: str) -> Iterator[None]:
    """While the context lasts, JAX's runtime gets a way to end this process in one line.

    By default it writes a stack of C++ and aborts. The runtime of jax 0.10 cannot pass its reason
    to a function of Python and aborts on trying, without a stack: the line is that of SIGABRT then.
    """
    if not program:
        yield
        return

    def end(*_: object) -> None:
        os.write(2, f"{program}: {LOST}\n".encode())
        os._exit(1)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)
    _kept.append(handler)
    # The handlers of Python's `signal` run later, and an abort does not wait for them.
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    runtime: Any = getattr(distributed, "_jax", None)
    make = getattr(runtime, "get_distributed_runtime_client", None)
    if make is None:  # Another version of JAX: then with its stack above the line.
        yield
        return
    runtime.get_distributed_runtime_client = functools.partial(make, missed_heartbeat_callback=end)
    try:
        yield
    finally:
        runtime.get_distributed_runtime_client = make


_kept: list[Any] = []
"""What C code calls must outlive this module's functions."""


def is_first() -> bool:
    """Whether this process writes files for all processes of the run."""
    return jax.process_index() == 0


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Runs the body on every process; if it fails on one process, it raises on all of them.

    All processes wait for each other at the end of the body. The body itself must not wait for
    other processes.

    Raises:
      OtherProcessError: the body of another process failed. If the body of this process failed,
        its own error is raised.
    """
    if jax.process_count() == 1:
        yield
        return
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    messages = _everyones("" if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for process, message in enumerate(messages):
        if message:
            raise OtherProcessError(f"Process {process} of the run failed: {message}")


def _everyones(message: str) -> list[str]:
    """The messages of all processes, in the order of the processes."""
    raw = np.frombuffer(message.encode()[:_LONGEST_MESSAGE], np.uint8)
    padded = np.pad(raw, (0, _LONGEST_MESSAGE - raw.size))
    return [
        bytes(row).rstrip(b"\0").decode(errors="ignore")
        for row in multihost_utils.process_allgather(padded)
    ]


def from_first(value: Any) -> Any:
    """The first process's JSON value, on every process."""
    if jax.process_count() == 1:
        return value
    raw = np.frombuffer(json.dumps(value).encode(), np.uint8) if is_first() else np.zeros(0)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(raw.size)))
    padded = raw if is_first() else np.zeros(size)
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(padded.astype(np.uint8))))


class Greatest:
    """Computes the maximum of one number per process; every process gets the result."""

    def __init__(self) -> None:
        mesh = Mesh(np.asarray(jax.devices()), ("devices",))
        self._split = NamedSharding(mesh, P("devices"))
        self._max = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))

    def __call__(self, number: int) -> jax.Array:
        """An int32 scalar, equal on every process; returned before it is computed."""
        local = np.full(jax.local_device_count(), number, np.int32)
        return self._max(jax.make_array_from_process_local_data(self._split, local))
