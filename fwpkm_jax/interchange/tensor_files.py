"""The tensors of a folder of the transformers library: one safetensors file, or several.

Which files are read is the library's choice: the single file where there is one, whatever lies
beside it, otherwise those that the index names.
"""

from pathlib import Path

import numpy as np

from fwpkm_jax.io.safetensors import FLOATS, SafetensorsFile, StoredTensor, read_tensor
from fwpkm_jax.io.untrusted import OutsideFileError, read_json, reading, shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_FETCH = "fetch the folder again"


class TensorFiles(dict[str, StoredTensor]):
    """The tensors of a folder by name; `read` gives one."""

    def __init__(self, folder: str | Path, *, file: str | None = None):
        """Reads the headers.

        Args:
          folder: holds `model.safetensors`, or several files and an index of them.
          file: a file of another name, read alone.

        Raises:
          FileNotFoundError: a file is missing; the message says what is there in its place.
          OutsideFileError: a file is damaged, or is not what the index says.
        """
        folder = Path(folder)
        path = folder / (file or SINGLE)
        if path.is_file():
            super().__init__(SafetensorsFile(path, otherwise=_FETCH))
        elif file is None and (folder / INDEX).is_file():
            super().__init__(_indexed(folder))
        else:
            raise FileNotFoundError(_why_missing(folder, path, alone=file is not None))

    def read(self, name: str) -> np.ndarray:
        """The tensor in its own dtype.

        Raises:
          OutsideFileError: its dtype is none of float64, float32, float16 and bfloat16; or the
            file has become shorter.
        """
        tensor = self[name]
        if tensor.dtype not in FLOATS:
            raise OutsideFileError(
                tensor.file,
                f"is stored as {shown(tensor.dtype, 40)}; weights of {', '.join(FLOATS)} can be "
                "read, quantised ones cannot",
                f"tensor {name!r}",
                "import the model it was made from",
            )
        return read_tensor(name, tensor, otherwise=_FETCH)


def named_files(folder: Path, *, index: str = INDEX) -> dict[str, str]:
    """The file of each tensor, as the folder's index names it; each is a name in the folder.

    Raises:
      OutsideFileError: the index is damaged, or names something else.
    """
    path = folder / index
    values = read_json(path, otherwise=_FETCH, most=2**24, kind=dict, unique=True)
    places = values.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise OutsideFileError(path, "has no weight_map of tensors to files", otherwise=_FETCH)
    for name, file in places.items():
        if not isinstance(file, str) or not file or Path(file).name != file or file == "..":
            problem = f"names {shown(repr(file), 100)}, which is no file of the folder"
            raise OutsideFileError(path, problem, f"tensor {name!r}", _FETCH)
    return places


def _indexed(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of all files that the index names."""
    index, places = folder / INDEX, named_files(folder)
    tensors: dict[str, StoredTensor] = {}
    for file in dict.fromkeys(places.values()):
        with reading(index, place=f"the name {shown(file, 60)!r}", otherwise=_FETCH):
            there = (folder / file).is_file()
        if not there:
            raise FileNotFoundError(
                f"{index} names {shown(repr(file), 100)}, which is not in {folder}; {_FETCH}."
            )
        found = SafetensorsFile(folder / file, otherwise=_FETCH)
        double = [name for name in found if name in tensors]
        if double:
            other = tensors[double[0]].file.name
            problem = f"holds it, and so does {other}"
            raise OutsideFileError(folder / file, problem, f"tensor {double[0]!r}", _FETCH)
        tensors |= found
    for name, file in places.items():
        if name not in tensors:
            problem = "is named, and is in none of its files"
        elif tensors[name].file.name != file:
            problem = f"stands in {tensors[name].file.name}, and the index says {file}"
        else:
            continue
        raise OutsideFileError(index, problem, f"tensor {name!r}", _FETCH)
    return tensors


def _why_missing(folder: Path, path: Path, *, alone: bool) -> str:
    """The message for a folder without the files that should be there."""
    if alone:
        return f"{path} does not exist; {_FETCH}."
    if not folder.is_dir():
        return f"{folder} is no folder; name the folder of a model."
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    if shards:
        return (
            f"{folder} holds {shown(shards[0], 100)}"
            + (f" and {len(shards) - 1} more" if shards[1:] else "")
            + f", but neither {SINGLE} nor {INDEX}, which says what is in which file; fetch the "
            "index too."
        )
    if any((folder / name).is_file() for name in _PICKLES):
        return (
            f"{folder} holds its weights as {_PICKLES[0]} alone, and this reads safetensors; save "
            "it again with transformers' save_pretrained, which writes them."
        )
    return f"{path} does not exist, and no {INDEX} is there; {_FETCH}."
