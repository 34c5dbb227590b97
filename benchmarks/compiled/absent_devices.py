"""Describes devices that are not here, so that programs can be compiled for them.

TPUs need the package libtpu in the version that fits jax; the H100 needs jax-cuda13-plugin and
jax-cuda13-pjrt. They can be installed in a separate folder that PYTHONPATH names, so that the
environment itself remains one for the CPU.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Kernel

TPUS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
DEVICES: tuple[str, ...] = (*TPUS, "h100")

_TPU_KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "7x": "TPU7x"}

# Otherwise libtpu asks the cloud's metadata server about its machine.
_LIBTPU_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


def kernel_of(device: str) -> Kernel:
    return "tpu" if device in TPUS else "gpu"


@contextlib.contextmanager
def kernels_for(device: str, *, library: str | None = None) -> Iterator[None]:
    """Traces and lowers kernels for the device; needs no compiler of the device.

    Args:
      device: one of `DEVICES`.
      library: another package whose kernels are traced as well. It is told that the device is here.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(dispatch.compile_kernels(kernel_of(device)))
        if library == "jla":
            importlib.import_module("jla.ops.mosaic_gpu")
            for name, module in list(sys.modules.items()):
                if name.startswith("jla.") and hasattr(module, "is_hopper"):
                    stack.enter_context(mock.patch.object(module, "is_hopper", return_value=True))
        elif library is not None:
            stack.enter_context(mock.patch.object(jax, "default_backend", return_value="tpu"))
        if device in TPUS:
            # Lowering to Mosaic takes the kind of device from the mesh, or else this CPU's.
            kind = _TPU_KINDS[device]
            kind = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
            auto = (AxisType.Auto,)
            mesh = AbstractMesh((1,), ("only",), axis_types=auto, abstract_device=kind)
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield


def absent_device(device: str) -> Any:
    """A device to give argument shardings.

    Raises:
      ModuleNotFoundError: its compiler is not installed.
    """
    return absent_devices(TPUS.get(device, "h100:1x1x1"))[0]


@functools.cache
def absent_devices(topology: str) -> tuple[Any, ...]:
    """All devices of a topology: `v5e:2x2`, as libtpu calls it, or `h100:32x8x1`, as many machines
    with as many GPUs each."""
    kind, shape = topology.split(":")
    package = "jax_cuda13_plugin" if kind == "h100" else "libtpu"
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"{package} is not installed; docs/howto/compile_ahead.md has the command."
        )
    if kind == "h100":
        target = Path(__file__).with_name("h100.txtpb").read_text()
        description = topologies.get_topology_desc(
            platform="cuda", topology_name="h100", target_config=target, topology=shape
        )
    else:
        for name, value in _LIBTPU_ALONE.items():
            os.environ.setdefault(name, value)
        description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return tuple(description.devices)
