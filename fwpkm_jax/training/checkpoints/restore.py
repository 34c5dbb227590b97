"""Reads and checks checkpoints, with each array in the requested layout.

Each process reads the parts of the arrays that its own devices hold. So a model may be larger than
one device, and the mesh may differ from the one that it was saved with. If one process finds a
checkpoint damaged, all processes treat it as damaged.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from fwpkm_jax.io.untrusted import OutsideFileError, size_of
from fwpkm_jax.literals import some
from fwpkm_jax.storage.addresses import scheme_of
from fwpkm_jax.training.checkpoints.checksum import checksums
from fwpkm_jax.training.checkpoints.regroup import Regroup, all_groups, regroup
from fwpkm_jax.training.runs.mirror import run_folder
from fwpkm_jax.training.runs.processes import OtherProcessError, together
from fwpkm_jax.training.state import TrainState, named_leaves

logger = logging.getLogger(__name__)

_ARRAYS = "d"  # Folders with the arrays' bytes.
_MOST_BYTES = 2**26  # Of each other file.
_COPY = "put back a copy of the checkpoint"

Item = Literal["params", "optimizer", "memory"]
"""Arrays of a checkpoint: slow weights, the optimiser's state, memories by layer."""


class DamagedCheckpointError(Exception):
    """A checkpoint cannot be read, or its content differs from what was saved."""


class UnreadBaseError(OSError):
    """The bucket that holds frozen weights cannot be read; the checkpoint itself may be whole."""


class Reference(NamedTuple):
    """Frozen slow weights that a checkpoint does not hold; they are read from another one."""

    checkpoint: str
    """Absolute path or address of the checkpoint that holds them, `RUN/checkpoints/STEP`."""
    checksums: dict[str, int]
    """Checksum of each frozen weight, by its path."""


class Restored(NamedTuple):
    """The content of a checkpoint that has been checked."""

    state: TrainState
    """The state; `memory` and `opt_state` are empty if they were not saved."""
    data_position: Any
    """The result of the data iterator's `get_state`; None: the start of the data."""
    metrics: dict[str, float]
    """Validation metrics at that step; empty if there was no validation."""
    reference: Reference | None
    """Where frozen weights were read from; None: all weights are in the checkpoint."""


def array_items(state: TrainState) -> dict[str, Any]:
    """The items of a checkpoint that hold arrays; empty items are left out."""
    items = {"params": state.params, "optimizer": state.opt_state, "memory": state.memory}
    return {name: tree for name, tree in items.items() if jax.tree.leaves(tree)}


def nested(tree: Any) -> dict[str, Any]:
    """A tree's arrays in plain nested dicts, so that the tree's classes are not stored."""
    dicts: dict[str, Any] = {}
    for name, leaf in named_leaves(tree).items():
        *parents, last = name.split("/")
        place = dicts
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = leaf
    return dicts


def checkpoint_steps(directory: str | Path) -> list[int]:
    """Steps of the complete checkpoints in a directory, oldest first."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def read_checkpoint(
    directory: str | Path,
    step: int,
    abstract: TrainState,
    layout: TrainState | None = None,
    *,
    merge: Regroup = "refuse",
) -> Restored:
    """Reads one checkpoint and checks the shape, dtype and checksum of every array.

    Weights and moments that are stored in another dtype of real numbers than `abstract` has, as
    those of a bfloat16 model that trains in float32, are converted after the check.

    Args:
      directory: `RUN/checkpoints`.
      step: the step of the checkpoint.
      abstract: shapes and dtypes to restore into, from `jax.eval_shape` of `init_state`; with an
        empty `opt_state` the optimiser's state is not read.
      layout: the sharding of each array, from `training.sharding.state_shardings`; None: all on
        the first device.
      merge: what to do if it holds another number of memories, see `regroup`.

    Raises:
      ValueError: it holds another number of memories, and `regroup` cannot convert them.
      DamagedCheckpointError: the checkpoint is damaged; the message names it and the fault.
      UnreadBaseError: its frozen weights lie in a bucket, and cannot be read.
    """
    path = Path(directory).absolute() / str(step)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places: Any = layout or jax.tree.map(lambda _: device, abstract)
    items, layouts = array_items(abstract), array_items(places)
    try:
        with together():
            try:
                position = _read_json(path)
                if position["step"] != step:
                    raise ValueError(f"it holds step {position['step']}")
                rng = np.asarray(position["rng"], np.uint32)
                for name in ("memory", "optimizer"):
                    if name not in position["checksums"]:  # Not saved, or imported weights.
                        items.pop(name, None)
                wanted = {name: targets(tree, layouts[name]) for name, tree in items.items()}
                found = {
                    name: _read(path, some, name, any_groups=name == "memory")
                    for name, some in wanted.items()
                }
            except UnreadBaseError:  # Says nothing about this checkpoint, which stays.
                raise
            except Exception as error:  # Whatever a broken file makes the readers raise.
                raise DamagedCheckpointError(f"{path}: {brief(error)}") from error
    except OtherProcessError as error:
        raise DamagedCheckpointError(f"{path}: {brief(error)}") from error
    arrays = {}
    for name, tree in items.items():
        try:
            _check(path, found[name], _checksums_of(position, name), whole=True)
        except ValueError as error:
            raise DamagedCheckpointError(str(error)) from error
        leaves = [
            _as_dtype(found[name][leaf], like.dtype, like.sharding)
            for leaf, like in wanted[name].items()
        ]
        arrays[name] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
    memory: Any = {}
    if "memory" in arrays:
        memory = _regrouped(arrays["memory"], abstract.memory, places.memory, merge)
    state = TrainState(
        step=_put(np.asarray(step, np.int32), places.step),
        params=arrays["params"],
        opt_state=arrays.get("optimizer", ()),
        memory=memory,
        rng=jax.random.wrap_key_data(_put(rng, places.rng)),
    )
    return Restored(state, position["data"], position["metrics"], _reference(position))


def _reference(position: Mapping[str, Any]) -> Reference | None:
    stored = position.get("frozen")
    return None if stored is None else Reference(stored["checkpoint"], dict(stored["checksums"]))


def targets(tree: Any, layout: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of each array by its path."""
    places = named_leaves(layout)
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[name])
        for name, x in named_leaves(tree).items()
    }


def _checksums_of(position: Mapping[str, Any], item: str) -> dict[str, int]:
    """Checksums of an item's arrays by path, those of frozen weights included."""
    reference = _reference(position) if item == "params" else None
    own = position["checksums"].get(item, {})
    return own | (reference.checksums if reference is not None else {})


def stored_names(checkpoint: str | Path, item: Item) -> dict[str, int]:
    """The checksums of a checkpoint's arrays by path, those of frozen weights included."""
    return _checksums_of(_read_json(Path(checkpoint).absolute()), item)


def read_arrays(
    checkpoint: str | Path, wanted: Mapping[str, Any], *, item: Item
) -> dict[str, jax.Array]:
    """Reads some arrays of a checkpoint or of those that it refers to, and checks their checksums.

    The bytes of other arrays are not read.

    Raises:
      ValueError: there is no such checkpoint; an array is missing or damaged, or differs in shape
        or dtype.
      UnreadBaseError: arrays lie in a bucket, and cannot be read.
    """
    path = Path(checkpoint).absolute()
    found = _read(path, wanted, item)
    _check(path, found, stored_names(path, item))
    return {
        name: _as_dtype(x, wanted[name].dtype, wanted[name].sharding) for name, x in found.items()
    }


def _check(
    path: Path, found: Mapping[str, jax.Array], stored: Mapping[str, int], *, whole: bool = False
) -> None:
    """Raises ValueError where an array is not what was saved, or, of a whole item, is left out."""
    actual = checksums(found)
    for name in actual:
        if actual[name] != stored.get(name):
            raise ValueError(f"{path}: {name} is not what was saved (its checksum differs)")
    for name in stored.keys() - found.keys() if whole else ():
        raise ValueError(f"{path}: it holds {name}, for which the model has no place")


def _read(
    path: Path, wanted: Mapping[str, Any], item: str, *, any_groups: bool = False
) -> dict[str, jax.Array]:
    """Arrays in the dtypes in which they are stored, not checked; see `read_arrays`."""
    if not path.is_dir():
        raise ValueError(f"{path}, which holds frozen weights, does not exist; put it back")
    position = _read_json(path)
    stored = position["checksums"].get(item, {})
    here = {name: like for name, like in wanted.items() if name in stored}
    elsewhere = {name: like for name, like in wanted.items() if name not in stored}
    found = _read_stored(path / item, here, any_groups) if here else {}
    if elsewhere:
        reference = _reference(position)
        if reference is None or item != "params":
            raise ValueError(f"{path} has no {next(iter(elsewhere))}")
        with _referred(reference.checkpoint) as base:
            found |= _read(base, elsewhere, item)
    return found


@contextlib.contextmanager
def _referred(checkpoint: str) -> Iterator[Path]:
    """The folder of a checkpoint that holds frozen weights; of one in a bucket, a copy.

    Raises:
      UnreadBaseError: the bucket cannot be asked, or does not hold the checkpoint.
    """
    if scheme_of(checkpoint) is None:
        yield Path(checkpoint).absolute()
        return
    run, _, step = checkpoint.rpartition("/checkpoints/")
    with contextlib.ExitStack() as held:
        try:
            folder = held.enter_context(run_folder(run, checkpoints=int(step)))
        except (OSError, ValueError) as error:
            raise UnreadBaseError(f"Frozen weights lie in {checkpoint}: {error}") from error
        found = folder / "checkpoints" / step
        if not found.is_dir():
            raise UnreadBaseError(
                f"{checkpoint}, which holds frozen weights, does not exist or is damaged; put it "
                "back"
            )
        yield found


def _read_stored(path: Any, wanted: Mapping[str, Any], any_groups: bool) -> dict[str, jax.Array]:
    """Some arrays of an item, in the dtypes in which they are stored; no other array is read.

    Uses Orbax's handlers: unlike its checkpointers, they do not wait for other processes.

    Args:
      wanted: see `read_arrays`.
      any_groups: the first axis, that of memories, may have another size.
    """
    handler = ocp.PyTreeCheckpointHandler()
    try:
        targets = {}
        there = named_leaves(handler.metadata(path).tree)
        for name, ours in wanted.items():
            stored, sharding = there[name], ours.sharding
            if any_groups and ours.shape != stored.shape:
                sharding = all_groups(sharding)
            axes = slice(1 if any_groups else 0, None)
            real = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (stored, ours))
            converts = real or stored.dtype == ours.dtype
            if ours.shape[axes] != stored.shape[axes] or not converts:
                raise ValueError(
                    f"{path}/{name} is {stored.dtype}{list(stored.shape)}; the model's is "
                    f"{ours.dtype}{list(ours.shape)}"
                )
            targets[name] = jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=sharding)
        targets = nested(targets)
        how = ocp.checkpoint_utils.construct_restore_args(targets)
        args = ocp.args.PyTreeRestore(targets, restore_args=how, partial_restore=True)
        read = named_leaves(handler.restore(path, args=args))
    finally:
        handler.close()
    return {name: read[name] for name in wanted}


def _as_dtype(x: jax.Array, dtype: Any, place: Any) -> jax.Array:
    """The array in another dtype, on the devices of `place`."""
    return x if x.dtype == dtype else _cast(dtype, place)(x)


@functools.cache
def _cast(dtype: Any, place: Any) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x.astype(dtype), out_shardings=place)


def _put(array: np.ndarray, place: Any) -> jax.Array:
    """The array on its devices; in a run of several processes, on those of this one."""
    return jax.make_array_from_callback(array.shape, place, lambda index: array[index])


def _regrouped(memory: Any, abstract: Any, layout: Any, merge: Regroup) -> Any:
    """Saved memories, converted to the number of groups of `abstract` and to `layout`."""
    groups = jax.tree.leaves(abstract)[0].shape[0]
    if jax.tree.leaves(memory)[0].shape[0] == groups:
        return memory
    return jax.jit(lambda memory: regroup(memory, groups, merge), out_shardings=layout)(memory)


def check_files(checkpoint: Path) -> None:
    """Looks at a checkpoint's files before a library reads them, which would wait for a pipe.

    Raises:
      OutsideFileError: one is no plain file, or too long for one that holds no arrays.
    """
    for folder, _, names in os.walk(checkpoint):
        for file in (Path(folder, name) for name in names):
            size = size_of(file, otherwise=_COPY)
            if file.parent.name != _ARRAYS and size > _MOST_BYTES:
                problem = f"has {size:,} bytes, and at most {_MOST_BYTES:,} are expected"
                raise OutsideFileError(file, problem, otherwise=_COPY)


def _read_json(path: Any) -> dict[str, Any]:
    """The checkpoint's item `position`: the values that are not arrays."""
    check_files(path)
    handler = ocp.JsonCheckpointHandler()
    try:
        return dict(handler.restore(path / "position", args=ocp.args.JsonRestore()))
    finally:
        handler.close()


def find_step(directory: str | Path, which: int | Literal["best"] | None) -> int:
    """The step of the checkpoint asked for.

    Args:
      directory: `RUN/checkpoints`.
      which: a step, "best" for the lowest validation loss, None for the newest.

    Raises:
      FileNotFoundError: there is no such checkpoint; those that exist are listed.
    """
    steps = checkpoint_steps(directory)
    if not steps:
        raise FileNotFoundError(f"{directory} holds no complete checkpoint.")
    if which is None:
        return steps[-1]
    if which == "best":
        metrics = {step: read_metrics(directory, step) for step in steps}
        judged = {step: values["loss"] for step, values in metrics.items() if values}
        if not judged:
            raise FileNotFoundError(
                f"No checkpoint in {directory} has a validation loss, so none is the best; "
                f"name a step out of {some(list(map(str, steps)))} or set training.validate_every."
            )
        return min(judged, key=lambda step: judged[step])
    if which not in steps:
        there = some(list(map(str, steps)), like=str(which))
        raise FileNotFoundError(f"There is no checkpoint of step {which} in {directory}: {there}.")
    return which


def read_metrics(directory: str | Path, step: int) -> dict[str, float]:
    """The validation metrics saved with a checkpoint; empty if there are none or it is damaged."""
    path = Path(directory).absolute() / str(step)
    try:
        return _read_json(path)["metrics"]
    except Exception as error:  # As in `read_checkpoint`.
        logger.warning(
            "The validation loss of %s cannot be read (%s): it is damaged, or a process died while "
            "it removed it.",
            *(path, brief(error)),
        )
        return {}


def brief(error: Exception) -> str:
    """An error in one line of limited length; the storage layer's messages can fill pages."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:150]} ... {text[-150:]}"
