"""Reads the tensors of a file that `torch.save` wrote, without torch and without running its code.

Such a file is a zip archive of raw arrays and a pickle that describes them. A pickle is a program:
it can name any function to be called, claim any size and place, and hand its own objects to those
functions. So it is not loaded. `_Program` carries out the few operations that `torch.save` needs,
each with its operands checked, and knows no function beside those that make tensors and dicts.

Why not torch's own safe loader: it would make a package of gigabytes a requirement for reading one
format, its checks of storages have had faults too, and it allocates what a file claims. The
operations here are about forty, and all of them can be tested.
"""

from __future__ import annotations

import collections
import io
import math
import pickletools
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from fwpkm_jax.outside_files import OutsideFileError, reading, shown, size_of

_MOST_PICKLE_BYTES = 2**24
_MOST_OPERATIONS = 2_000_000
_MOST_AXES = 32
_OTHERWISE = "fetch it again, or save the model's state_dict as safetensors"
_DTYPES = {
    "BFloat16Storage": ml_dtypes.bfloat16,
    "HalfStorage": np.float16,
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "BoolStorage": np.bool_,
}


class _StorageType(NamedTuple):
    """A name of torch that stands for a dtype."""

    dtype: np.dtype


class _Storage(NamedTuple):
    """A member of the archive as numbers; only `_Archive.storage` makes one."""

    numbers: np.ndarray


class Unread(NamedTuple):
    """What stands in a file where it holds something else than tensors, dicts and plain values.

    Attributes:
      name: of the class or function that the file names; it is neither made nor called.
    """

    name: str


class _Mark:
    """Where the items of a list, tuple or dict begin on the stack."""


class _Function(NamedTuple):
    """A name that a pickle may call."""

    name: str


_FUNCTIONS = {
    ("collections", "OrderedDict"): _Function("dict"),
    ("torch._utils", "_rebuild_tensor_v2"): _Function("tensor"),
    ("torch._utils", "_rebuild_parameter"): _Function("parameter"),
    ("torch", "Size"): _Function("size"),
}


def read_torch_file(path: str | Path, *, others: Literal["refuse", "skip"] = "refuse") -> Any:
    """The content of the file: dicts, lists, numbers and strings, with arrays in place of tensors.

    Args:
      path: of the file.
      others: what becomes of objects of other kinds, such as the settings and random states that
        DeepSpeed writes beside a model: refuse the file, or leave an `Unread` in their place.

    Raises:
      FileNotFoundError: there is no such file.
      OutsideFileError: it has another format, is damaged, or holds objects of other kinds.
    """
    path = Path(path)
    size = size_of(path, otherwise="name a file that torch.save wrote")
    with reading(path, problem="cannot be read", otherwise=_OTHERWISE):
        try:
            with zipfile.ZipFile(path) as archive:
                return _Archive(archive, size).content(skip=others == "skip")
        except zipfile.BadZipFile as error:
            raise OutsideFileError(
                path,
                f"is not a zip archive, the format of torch since version 1.6: {error}",
                otherwise="convert it to safetensors",
            ) from error


class _Archive:
    """The members of a file, each read once, and together no more than the file holds."""

    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        self._archive, self._left = archive, size
        self._storages: dict[str, _Storage] = {}
        names = archive.namelist()
        pickles = [name for name in names if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"it has {len(pickles)} entries data.pkl; one was expected")
        self._folder = pickles[0].removesuffix("data.pkl")
        if f"{self._folder}byteorder" in names:
            order = self._member("byteorder", most=16).decode()
            if order != "little":
                raise ValueError(f"its byte order is {shown(order)!r}; only 'little' is supported")

    def content(self, *, skip: bool) -> Any:
        """What the pickle describes."""
        program = _Program(self, skip=skip)
        return program.run(self._member("data.pkl", most=_MOST_PICKLE_BYTES))

    def storage(self, identity: Any) -> _Storage | Unread:
        """The numbers that a pickle refers to.

        Args:
          identity: as torch writes it: "storage", type, key, location, number of elements.
        """
        if not isinstance(identity, tuple) or len(identity) != 5:
            raise ValueError("it refers to something else than a tensor's storage")
        kind, storage, key, _location, size = identity
        if isinstance(storage, Unread):
            return storage
        if kind != "storage" or not isinstance(storage, _StorageType):
            raise ValueError("it refers to something else than a tensor's storage")
        if not isinstance(key, str) or not _are_counts([size]):
            raise ValueError("a storage has no name or no size")
        if key not in self._storages:
            data = self._member(f"data/{key}", exactly=size * storage.dtype.itemsize)
            self._storages[key] = _Storage(np.frombuffer(data, storage.dtype))
        numbers = self._storages[key].numbers
        if (numbers.dtype, numbers.size) != (storage.dtype, size):
            raise ValueError(f"storage {shown(key, 40)} is described in two ways")
        return self._storages[key]

    def _member(self, name: str, *, most: int = 0, exactly: int | None = None) -> bytes:
        """A member's bytes, if it has so many and the file has room for them."""
        name = self._folder + name
        try:
            info = self._archive.getinfo(name)
        except KeyError:
            raise ValueError(f"it has no entry {shown(name, 100)}") from None
        most = most if exactly is None else exactly
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise ValueError(f"{shown(name, 100)} is compressed; torch.save stores without")
        size = info.file_size
        if size > most or (exactly is not None and size != exactly):
            expected = "at most" if exactly is None else "exactly"
            raise ValueError(
                f"{shown(name, 100)} has {size:,} bytes; {expected} {most:,} are expected"
            )
        self._left -= size
        if self._left < 0:
            raise ValueError("its members claim more bytes than it has")
        return self._archive.read(info)  # Reading to the end checks the archive's checksum.


class _Program:
    """The operations of a pickle that describes tensors; every other one is refused by name.

    With `skip`, what is made of a name that is unknown is an `Unread`, whatever it is given.
    """

    def __init__(self, archive: _Archive, *, skip: bool) -> None:
        self._archive, self._skip = archive, skip
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        """Carries out the operations; what the last one leaves."""
        stream = io.BytesIO(content)
        for number, (operation, argument, _) in enumerate(pickletools.genops(stream)):
            if number >= _MOST_OPERATIONS:
                raise ValueError(f"its pickle has more than {_MOST_OPERATIONS:,} operations")
            name = operation.name
            if name == "STOP":
                return self._pop()
            if name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name in _VALUES:
                self._stack.append(argument)
            elif self._skip and name in _SKIPPED:
                self._stack.append(Unread(name))
            elif (act := getattr(self, f"_do_{name.lower()}", None)) is not None:
                act(argument)
            elif name not in ("PROTO", "FRAME"):
                raise ValueError(f"its pickle has the operation {name}, which no tensor needs")
        raise ValueError("its pickle has no end")

    def _pop(self) -> Any:
        if not self._stack or isinstance(self._stack[-1], _Mark):
            raise ValueError("its pickle takes more than it has put down")
        return self._stack.pop()

    def _since_mark(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if isinstance(self._stack[place], _Mark):
                items = self._stack[place + 1 :]
                del self._stack[place:]
                return items
        raise ValueError("its pickle ends a list that it has not begun")

    def _top(self, kind: type) -> Any:
        if self._stack and isinstance(self._stack[-1], Unread):
            return kind()  # What is put into it is not kept.
        if not self._stack or not isinstance(self._stack[-1], kind):
            raise ValueError("its pickle adds items to what takes none")
        return self._stack[-1]

    def _do_mark(self, _: Any) -> None:
        self._stack.append(_Mark())

    def _do_pop(self, _: Any) -> None:
        self._pop()

    def _do_empty_dict(self, _: Any) -> None:
        self._stack.append({})

    def _do_empty_list(self, _: Any) -> None:
        self._stack.append([])

    def _do_tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._since_mark()))

    def _do_tuple1(self, _: Any) -> None:
        self._stack.append((self._pop(),))

    def _do_tuple2(self, _: Any) -> None:
        self._stack.append((self._pop(), self._pop())[::-1])

    def _do_tuple3(self, _: Any) -> None:
        self._stack.append((self._pop(), self._pop(), self._pop())[::-1])

    def _do_list(self, _: Any) -> None:
        self._stack.append(self._since_mark())

    def _do_dict(self, _: Any) -> None:
        items = self._since_mark()
        self._stack.append({})
        self._set(items)

    def _do_append(self, _: Any) -> None:
        item = self._pop()
        self._top(list).append(item)

    def _do_appends(self, _: Any) -> None:
        items = self._since_mark()
        self._top(list).extend(items)

    def _do_setitem(self, _: Any) -> None:
        value, key = self._pop(), self._pop()
        self._set([key, value])

    def _do_setitems(self, _: Any) -> None:
        self._set(self._since_mark())

    def _set(self, items: list[Any]) -> None:
        target = self._top(dict)
        if len(items) % 2:
            raise ValueError("its pickle has a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Tuples within tuples could take for ever to hash.
            if not isinstance(key, str | int | float):
                if self._skip:
                    continue
                raise ValueError("it has a dict whose keys are no strings or numbers")
            target[key] = value

    def _do_get(self, number: Any) -> None:
        if number not in self._memo:
            raise ValueError("its pickle refers to what it has not kept")
        self._stack.append(self._memo[number])

    _do_binget = _do_long_binget = _do_get

    def _do_put(self, number: Any) -> None:
        if not self._stack:
            raise ValueError("its pickle keeps what is not there")
        self._memo[number] = self._stack[-1]

    _do_binput = _do_long_binput = _do_put

    def _do_memoize(self, _: Any) -> None:
        self._do_put(len(self._memo))

    def _do_global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._stack.append(self._named(module, name))

    def _do_stack_global(self, _: Any) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("its pickle names something with what is no name")
        self._stack.append(self._named(module, name))

    def _named(self, module: str, name: str) -> Any:
        if self._skip and not _is_known(module, name):
            return Unread(f"{module}.{name}")
        return _named(module, name)

    def _do_binpersid(self, _: Any) -> None:
        self._stack.append(self._archive.storage(self._pop()))

    def _do_reduce(self, _: Any) -> None:
        arguments, function = self._pop(), self._pop()
        if isinstance(function, Unread):
            self._stack.append(function)
            return
        if not isinstance(function, _Function) or not isinstance(arguments, tuple):
            raise ValueError("its pickle calls what is no function")
        unread = next((x for x in arguments[:1] if isinstance(x, Unread)), None)
        if unread is not None:
            self._stack.append(unread)
            return
        if function.name == "dict":
            self._stack.append(_ordered(arguments))
        elif function.name == "tensor":
            self._stack.append(_tensor(arguments))
        elif function.name == "size":
            self._stack.append(_shape(arguments))
        else:
            if not arguments or not isinstance(arguments[0], np.ndarray):
                raise ValueError("it has a parameter without a tensor")
            self._stack.append(arguments[0])

    def _do_build(self, _: Any) -> None:
        """Of a state_dict: attributes, such as versions, which do not belong to the weights."""
        self._pop()
        self._top(dict)

    def _do_newobj(self, _: Any) -> None:
        self._pop()
        if not self._stack or not isinstance(self._stack[-1], Unread):
            raise ValueError("its pickle has the operation NEWOBJ, which no tensor needs")

    def _do_additems(self, _: Any) -> None:
        self._since_mark()
        if not self._stack or not isinstance(self._stack[-1], Unread):
            raise ValueError("its pickle has the operation ADDITEMS, which no tensor needs")


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING"),
}
_SKIPPED = {"EMPTY_SET", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
"""Values of no use for tensors, which some files hold beside them."""


def _is_known(module: str, name: str) -> bool:
    return (module, name) in _FUNCTIONS or (module == "torch" and name in _DTYPES)


def _named(module: str, name: str) -> Any:
    """What a pickle may name: functions that make tensors and dicts, and kinds of storages."""
    if module == "torch" and name in _DTYPES:
        return _StorageType(np.dtype(_DTYPES[name]))
    if (module, name) not in _FUNCTIONS:
        raise ValueError(
            f"it holds a {shown(module, 100)}.{shown(name, 100)}, which is not a tensor; save the "
            "model's state_dict alone"
        )
    return _FUNCTIONS[module, name]


def _ordered(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    pairs = arguments[0] if arguments else []
    made: dict[Any, Any] = collections.OrderedDict()
    if not isinstance(pairs, list) or len(arguments) > 1:
        raise ValueError("it has a dict that is made of what is no list")
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError("it has a dict whose items are no pairs of name and value")
        made[pair[0]] = pair[1]
    return made


def _shape(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """The sizes of a tensor that is described without one."""
    sizes = arguments[0] if len(arguments) == 1 else None
    if not isinstance(sizes, tuple | list) or not _are_counts(sizes):
        raise ValueError("it has a size that is made of what are no sizes")
    return tuple(sizes)


def _tensor(arguments: tuple[Any, ...]) -> np.ndarray:
    """A tensor as a view of its storage, within the bytes that are there."""
    if len(arguments) < 4 or not isinstance(arguments[0], _Storage):
        raise ValueError("it has a tensor whose numbers are no storage of the file")
    numbers, (offset, shape, strides) = arguments[0].numbers, arguments[1:4]
    if not isinstance(shape, tuple | list) or not isinstance(strides, tuple | list):
        raise ValueError("a tensor has no shape or no strides")
    if len(shape) != len(strides) or len(shape) > _MOST_AXES:
        raise ValueError(f"a tensor has {len(shape)} sizes and {len(strides)} strides")
    if not _are_counts([offset, *shape, *strides]):
        raise ValueError("a tensor has a negative size, stride or offset, or one that is no number")
    size = math.prod(shape)
    if size > numbers.size:
        raise ValueError(
            f"a tensor of shape {shown(tuple(shape), 60)} has more numbers than its storage, "
            f"{numbers.size:,}"
        )
    if not size:
        return np.zeros(tuple(shape), numbers.dtype)
    reach = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if reach >= numbers.size:
        raise ValueError(
            f"a tensor of shape {shown(tuple(shape), 60)} reaches beyond its storage, "
            f"{numbers.size:,} numbers"
        )
    # A stride of an axis of one entry is never taken, and may be too large for NumPy.
    steps = [s * numbers.itemsize if n > 1 else 0 for n, s in zip(shape, strides, strict=True)]
    return np.lib.stride_tricks.as_strided(numbers[offset:], tuple(shape), steps, writeable=False)


def _are_counts(values: Iterable[Any]) -> bool:
    return all(type(x) is int and 0 <= x < 2**62 for x in values)
