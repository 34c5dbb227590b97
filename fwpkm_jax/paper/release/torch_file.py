"""The tensors of a file that `torch.save` wrote, which torch reads, where it is installed."""

import re
from pathlib import Path
from typing import Any

from fwpkm_jax.io.untrusted import OutsideFileError, reading, size_of

_WAY_OUT = (
    "where torch is, save the tensors alone: safetensors.torch.save_file(torch.load(FILE)['module']"
    " or torch.load(FILE), 'model.safetensors')"
)


def read_torch_file(path: str | Path) -> Any:
    """What the file holds, with NumPy arrays for the tensors of a dict; bfloat16 as float32.

    Such a file is a pickle, which is a program: torch's loader of weights refuses whatever makes
    more than tensors and plain values.

    Raises:
      FileNotFoundError: there is no such file.
      ImportError: torch is not installed.
      OutsideFileError: the file is damaged, or holds something that torch's loader refuses.
    """
    size_of(path)
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"{path} is a file of torch, which is not installed: pip install torch; or, {_WAY_OUT}."
        ) from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # torch's own message advises to run the file's code.
        named = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"holds a {named[1]}, no tensor" if named else f"is damaged ({error})"
        raise OutsideFileError(path, reason, otherwise=_WAY_OUT) from error

    def arrays(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: arrays(x) for name, x in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()

    with reading(path, otherwise=_WAY_OUT):
        return arrays(content)
