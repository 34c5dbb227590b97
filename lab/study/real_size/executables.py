"""The programs of the variants as files: compiled for a device that is not here, loaded on it.

A sitting that loads them neither traces nor compiles, nor checks kernels before their first use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from benchmarks.compiled import executables
from benchmarks.compiled.absent_devices import absent_device, kernels_for
from benchmarks.first_light import sources
from fwpkm_jax.models.config import ModelConfig
from lab.study.real_size.programs import Programs, compile_programs, futures_of
from lab.study.real_size.sizes import Size

_ENDING = ".exe.xz"


def source() -> str:
    """The hash of everything that the programs are made of."""
    own = [f"lab/study/real_size/{name}.py" for name in ("programs", "sizes")]
    return sources.digest(sources.KERNELS, sources.LIBRARY, *own)


def make(
    models: Mapping[str, ModelConfig],
    size: Size,
    folder: Path,
    *,
    device: str,
    write: Callable[..., None],
) -> None:
    """Compiles every program of the variants and writes a file for each.

    Args:
      models: the variants by name.
      size: of rows and batch.
      folder: for the files.
      device: a name in `absent_devices.DEVICES`, or cpu for this one.
      write: gets a line for each file.
    """
    here = device == "cpu"
    with contextlib.nullcontext() if here else kernels_for(device):
        place = None if here else SingleDeviceSharding(absent_device(device))

        def on_device(tree: Any) -> Any:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree
            )

        # Few at once: an absent device is compiled for on a small machine.
        found = compile_programs(
            models,
            size,
            compile_for=on_device,
            options={} if here else executables.CUBLAS,
            threads=2,
        )
        for variant, programs in found.items():
            for name, future in programs._asdict().items():
                if future is None:
                    continue
                path = folder / f"{variant}.{name}{_ENDING}"
                written = executables.write(path, future.result(), source=source())
                write(part="made", file=path.name, megabytes=round(written / 1e6, 2))


def load(variants: tuple[str, ...], folder: Path) -> dict[str, Programs]:
    """The programs of `make` for this process's device.

    Raises:
      FileNotFoundError: a variant has no files.
      ValueError: a file was made of another source.
    """
    with ThreadPoolExecutor() as pool:
        found: dict[str, dict[str, Future[Any]]] = {
            variant: {
                name: pool.submit(_load, path)
                for name in Programs._fields
                if (path := folder / f"{variant}.{name}{_ENDING}").exists()
            }
            for variant in variants
        }
    absent = [variant for variant, programs in found.items() if "step" not in programs]
    if absent:
        raise FileNotFoundError(f"{folder} has no programs of {absent}.")
    programs = {
        variant: Programs(**{name: made.get(name) for name in Programs._fields})
        for variant, made in found.items()
    }
    for one in programs.values():
        for future in futures_of(one):
            future.result()
    return programs


def _load(path: Path) -> Any:
    compiled, facts = executables.load(path)
    if facts["source"] != source():
        raise ValueError(f"{path} was made of source {facts['source']}; here it is {source()}.")
    return compiled
