"""The layouts in which the authors' code and the libraries below it write a checkpoint.

| layout | files |
|---|---|
| one file | any `.safetensors` file, or any file of `torch.save` |
| a folder with one file | `model.safetensors` or `pytorch_model.bin` |
| shards | `model.safetensors.index.json` or `pytorch_model.bin.index.json` and its files |
| DeepSpeed, stages 0 to 2 | `mp_rank_00_model_states.pt`, there or where `latest` says |

Where several are there, the first of these is read, as the transformers library does.
"""

from pathlib import Path
from typing import Any

import numpy as np

from fwpkm_jax.interchange.tensor_files import INDEX, SINGLE, named_files
from fwpkm_jax.io.safetensors import SafetensorsFile
from fwpkm_jax.io.untrusted import OutsideFileError, open_file, shown
from fwpkm_jax.paper.release.torch_file import read_torch_file

BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
LATEST = "latest"
STATES = "mp_rank_00_model_states.pt"
_STEPS = "global_step*"
_MERGE = (
    "run DeepSpeed's zero_to_fp32.py, which lies beside it, and import the pytorch_model.bin it "
    "writes"
)
_STATE_DICT = "save the model's state_dict"
_FETCH = "fetch the folder again"
_MOST_NAME = 200  # Of the folder that `latest` names, in bytes.
_WRAPPERS = ("_orig_mod.", "module.")
"""What torch.compile and data parallelism put in front of every name."""


def read_checkpoint(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint by name.

    Args:
      path: a file or a folder, see the module.

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
      OutsideFileError: an index is damaged, or the checkpoint is cut up over devices.
    """
    if not path.is_dir():
        _refuse_parts(path)
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
    file = _deepspeed_folder(path) / STATES
    _refuse_parts(file)
    if not file.is_file():
        raise FileNotFoundError(
            f"{path} holds none of {SINGLE}, {INDEX}, {BIN}, {BIN_INDEX} and {STATES}; name a "
            "folder or a file that the authors' code has written."
        )
    return [file]


def named_step(folder: Path) -> str | None:
    """The folder that DeepSpeed's file `latest` names; None without that file.

    Raises:
      OutsideFileError: the file names something else than a folder beside it.
    """
    latest = folder / LATEST
    if not latest.is_file():
        return None
    with open_file(latest) as file:
        name = file.read(_MOST_NAME + 1).decode("utf-8", "replace").strip()
    plain = name and name.isprintable() and len(name.encode()) <= _MOST_NAME
    if not plain or Path(name).name != name or name == "..":
        problem = f"names {shown(repr(name), 100)}, no folder beside it"
        raise OutsideFileError(latest, problem, otherwise=_FETCH)
    return name


def _deepspeed_folder(folder: Path) -> Path:
    """Where the model's states should lie."""
    name = named_step(folder)
    if name is not None:
        if not (folder / name).is_dir():
            raise FileNotFoundError(f"{folder / LATEST} names {name}, which is not in {folder}.")
        return folder / name
    steps = sorted(x for x in folder.glob(_STEPS) if x.is_dir())
    if len(steps) > 1:
        raise OutsideFileError(
            folder,
            f"holds {len(steps)} steps ({', '.join(x.name for x in steps[:3])}) and no file "
            f"{LATEST} that names one",
            otherwise="name the folder of a step",
        )
    return steps[0] if steps else folder


def _refuse_parts(file: Path) -> None:
    """Raises OutsideFileError where a model's states are cut up over devices."""
    zero = sorted(file.parent.glob("zero_pp_rank_*_model_states.pt"))
    if zero and file.name in (STATES, *(x.name for x in zero)):
        raise OutsideFileError(
            zero[0], "is a part of a model that ZeRO stage 3 has cut up", otherwise=_MERGE
        )
    parts = sorted(file.parent.glob("mp_rank_*_model_states.pt"))
    if len(parts) > 1 and file in parts:
        raise OutsideFileError(
            file,
            f"is one of {len(parts)} parts of a model that was cut up by tensor parallelism, which "
            "the authors' code does not do",
            otherwise="import a checkpoint of theirs",
        )


def _read_file(path: Path) -> dict[str, np.ndarray]:
    """The tensors of one file; of a dict that holds a model under `module`, those."""
    if path.suffix == ".safetensors":
        stored = SafetensorsFile(path)
        return {name: stored.read(name) for name in stored}
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
