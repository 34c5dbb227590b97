"""A trained model in few bytes: weights of eight bits with a scale for each row, in some files."""

from __future__ import annotations

import io
import re
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fwpkm_jax.training.state import named_leaves

LARGEST = 15 * 2**20
"""Bytes of a file."""


def save_checkpoint(params: Any, folder: Path, name: str, *, most_files: int) -> list[Path]:
    """Writes `NAME_0.bin`, `NAME_1.bin` and so on; the files, none if they would be too many.

    Vectors stay float32. The fast weights are not stored: reading text writes them again.
    """
    arrays: dict[str, Any] = {}
    for path, leaf in named_leaves(jax.device_get(params)).items():
        if leaf.ndim < 2:
            arrays[path] = leaf
        else:
            scale = np.maximum(np.abs(leaf).max(axis=-1, keepdims=True), 1e-30) / 127
            arrays[f"{path}:scale"] = scale.astype(np.float32)
            arrays[f"{path}:int8"] = np.rint(leaf / scale).astype(np.int8)
    whole = io.BytesIO()
    np.savez(whole, **arrays)
    packed = zlib.compress(whole.getvalue(), 6)
    pieces = [packed[at : at + LARGEST] for at in range(0, len(packed), LARGEST)]
    if len(pieces) > most_files:
        return []
    files = [folder / f"{name}_{number}.bin" for number in range(len(pieces))]
    for file, piece in zip(files, pieces, strict=True):
        file.write_bytes(piece)
    return files


def load_checkpoint(params: Any, folder: Path, name: str) -> Any:
    """Parameters like `params`, which give names and shapes, from files of `save_checkpoint`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the files hold another model's parameters.
    """
    files = [file for file in folder.iterdir() if re.fullmatch(rf"{name}_\d+\.bin", file.name)]
    if not files:
        raise FileNotFoundError(f"{folder} holds no {name}_0.bin; check the folder and the name.")
    files.sort(key=lambda file: int(file.stem.rpartition("_")[2]))
    packed = b"".join(file.read_bytes() for file in files)
    arrays = np.load(io.BytesIO(zlib.decompress(packed)))
    leaves = []
    for path, leaf in named_leaves(params).items():
        if path in arrays:
            found = arrays[path]
        elif f"{path}:int8" in arrays:
            found = arrays[f"{path}:int8"] * arrays[f"{path}:scale"]
        else:
            raise ValueError(f"{folder}/{name}_*.bin hold no {path}; the model is another one.")
        if found.shape != leaf.shape:
            raise ValueError(
                f"{folder}/{name}_*.bin: {path} has shape {found.shape}, the model {leaf.shape}; "
                "build the model at the size that was trained."
            )
        leaves.append(jnp.asarray(found, leaf.dtype))
    return jax.tree.unflatten(jax.tree.structure(params), leaves)
