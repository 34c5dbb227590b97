"""The layouts in which the authors' code and the libraries below it write a checkpoint.

| layout | files |
|---|---|
| one file | any `.safetensors` file, or any file of `torch.save` |
| a folder with one file | `model.safetensors` or `pytorch_model.bin` |
| shards | `model.safetensors.index.json` or `pytorch_model.bin.index.json` and its files |

Where several are there, the first of these is read, as the transformers library does. Of DeepSpeed
(ZeRO stages 0 to 2), the file `mp_rank_00_model_states.pt` holds the model.
"""

from pathlib import Path
from typing import Any

import numpy as np

from fwpkm_jax.interchange.tensor_files import INDEX, SINGLE, named_files
from fwpkm_jax.io.safetensors import SafetensorsFile
from fwpkm_jax.io.status_line import watched
from fwpkm_jax.io.untrusted import OutsideFileError, shown
from fwpkm_jax.paper.release.torch_file import read_torch_file

BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_MERGE = (
    "run DeepSpeed's zero_to_fp32.py, which lies beside it, and import the pytorch_model.bin it "
    "writes"
)
_STATE_DICT = "save the model's state_dict"
_FETCH = "fetch the folder again"
_WRAPPERS = ("_orig_mod.", "module.")
"""What torch.compile and data parallelism put in front of every name."""


def read_checkpoint(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint by name.

    Raises:
      FileNotFoundError: there is no checkpoint; the message says what was looked for.
      OutsideFileError: a file is damaged, holds something else than tensors, or holds a part of the
        model only.
    """
    tensors: dict[str, np.ndarray] = {}
    for file in checkpoint_files(path):
        found = _read_file(file)
        double = next((name for name in found if name in tensors), None)
        if double is not None:
            problem = "holds it, and so does another file"
            raise OutsideFileError(file, problem, f"tensor {double!r}", _FETCH)
        tensors |= found
    for wrapper in _WRAPPERS:
        if tensors and all(name.startswith(wrapper) for name in tensors):
            tensors = {name.removeprefix(wrapper): array for name, array in tensors.items()}
    return tensors


def checkpoint_files(path: Path) -> list[Path]:
    """The files of a checkpoint.

    Raises:
      FileNotFoundError: there is no checkpoint; the message says what was looked for.
      OutsideFileError: an index is damaged.
    """
    if not path.is_dir():
        return [path]
    for single, index in ((SINGLE, INDEX), (BIN, BIN_INDEX)):
        if (path / single).is_file():
            return [path / single]
        if (path / index).is_file():
            files = dict.fromkeys(named_files(path, index=index).values())
            missing = next((file for file in files if not (path / file).is_file()), None)
            if missing is not None:
                raise FileNotFoundError(
                    f"{path / index} names {shown(repr(missing), 100)}, which is not in {path}; "
                    f"{_FETCH}."
                )
            return [path / file for file in files]
    raise FileNotFoundError(
        f"{path} holds none of {SINGLE}, {INDEX}, {BIN} and {BIN_INDEX}; name a folder or a file "
        "that the authors' code has written, such as DeepSpeed's mp_rank_00_model_states.pt."
    )


def _read_file(path: Path) -> dict[str, np.ndarray]:
    """The tensors of one file; of a dict that holds a model under `module`, those."""
    if path.suffix == ".safetensors":
        stored = SafetensorsFile(path)
        return {name: stored.read(name) for name in watched(stored, "arrays read")}
    content: Any = read_torch_file(path)
    content = content.get("module", content) if isinstance(content, dict) else content
    if not isinstance(content, dict):
        raise OutsideFileError(path, "holds no dict of tensors", otherwise=_STATE_DICT)
    for name, x in content.items():
        if not isinstance(name, str) or not isinstance(x, np.ndarray):
            problem = f"holds {shown(name, 100)!r}, which is not a tensor"
            raise OutsideFileError(path, problem, otherwise=_STATE_DICT)
        if x.size == 0:
            problem = "is empty, as where ZeRO stage 3 has cut the model up"
            raise OutsideFileError(path, problem, f"tensor {shown(name, 100)!r}", _MERGE)
    return content
