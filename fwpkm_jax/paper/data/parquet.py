"""Parquet files of a data set that the paper reads."""

from __future__ import annotations

from pathlib import Path

from fwpkm_jax.data.prepare.sources import FilePart, file_parts


def parquet_parts(path: str | Path, *, wanted: str) -> list[FilePart]:
    """The Parquet files of a path or an address, in sorted order.

    Args:
      path: see `data_files`.
      wanted: what the error message asks to download.

    Raises:
      FileNotFoundError, ValueError: there are none; the message asks for `wanted`.
    """
    way_out = f"download {wanted} (docs/howto/data.md)."
    try:
        parts = [part for part in file_parts(path) if part.file.kind == ".parquet"]
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no {path}; {way_out}") from error
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}; {way_out}") from error
    if not parts:
        raise FileNotFoundError(f"{path} holds no Parquet file; {way_out}")
    return parts
