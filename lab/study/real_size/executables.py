"""The programs of the variants as files: compiled for a device that is not here, loaded on it.

A sitting that loads them neither traces nor compiles, nor checks kernels before their first use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from benchmarks.bring_up import sources
from benchmarks.compiled import executables
from benchmarks.compiled.absent_devices import absent_device, kernels_for
from fwpkm_jax.models.config import ModelConfig
from lab.study.real_size.programs import Programs, compile_programs
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


def load(
    variants: Sequence[str], folder: Path
) -> tuple[dict[tuple[str, str], Any], dict[str, str]]:
    """The programs of `make` that this process's device takes, and why it takes no others.

    Returns:
      made: programs by variant and name.
      failed: the reason by file.
    """
    made: dict[tuple[str, str], Any] = {}
    failed: dict[str, str] = {}
    for variant in variants:
        if not (folder / f"{variant}.step{_ENDING}").exists():
            failed[f"{variant}.step{_ENDING}"] = f"{folder} does not have it"
        for name in Programs._fields:
            path = folder / f"{variant}.{name}{_ENDING}"
            if not path.exists():
                continue
            try:
                compiled, facts = executables.load(path)
            except Exception as error:  # One that does not load is compiled.
                failed[path.name] = f"{type(error).__name__}: {error}"[:500]
                continue
            if facts["source"] == source():
                made[variant, name] = compiled
            else:
                failed[path.name] = f"made of source {facts['source']}; here it is {source()}"
    return made, failed
