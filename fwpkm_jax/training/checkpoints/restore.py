"""Reads and checks checkpoints, with each array in the requested layout.

Each process reads the parts of the arrays that its own devices hold. So a model may be larger than
one device, and the mesh may differ from the one that it was saved with. If one process finds a
checkpoint damaged, all processes treat it as damaged.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from fwpkm_jax.addresses import scheme_of
from fwpkm_jax.literals import some
from fwpkm_jax.training.checkpoints.checksum import checksums
from fwpkm_jax.training.checkpoints.regroup import Regroup, all_groups, regroup
from fwpkm_jax.training.runs.mirror import local_copy
from fwpkm_jax.training.runs.processes import OtherProcessError, together
from fwpkm_jax.training.state import TrainState, named_leaves

logger = logging.getLogger(__name__)


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
    converted: tuple[str, ...] = ()
    """Which dtypes were converted, as "bfloat16 to float32"."""


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


def _like(tree: Any, dicts: Mapping[str, Any]) -> Any:
    """The arrays of `dicts`, made by `nested`, in the structure of `tree`."""
    leaves = named_leaves(dicts)
    return jax.tree.unflatten(
        jax.tree.structure(tree), [leaves[name] for name in named_leaves(tree)]
    )


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
                expected = position["checksums"]
                for name in ("memory", "optimizer"):
                    if name not in expected:  # Not saved, or imported weights.
                        items.pop(name, None)
                reference = _reference(position)
                arrays = {
                    name: _read_params(path, tree, layouts[name], reference)
                    if name == "params" and reference is not None
                    else _read_arrays(path / name, tree, layouts[name])
                    for name, tree in items.items()
                }
                if reference is not None:
                    expected["params"] |= reference.checksums
                if position["step"] != step:
                    raise ValueError(f"it holds step {position['step']}")
                rng = np.asarray(position["rng"], np.uint32)
            except UnreadBaseError:  # Says nothing about this checkpoint, which stays.
                raise
            except Exception as error:  # Whatever a broken file makes the readers raise.
                raise DamagedCheckpointError(f"{path}: {brief(error)}") from error
    except OtherProcessError as error:
        raise DamagedCheckpointError(f"{path}: {brief(error)}") from error
    for name, tree in arrays.items():
        actual = checksums(tree)
        wrong = [leaf for leaf in actual if actual[leaf] != expected.get(name, {}).get(leaf)]
        if wrong:
            raise DamagedCheckpointError(
                f"{path}: {name}/{wrong[0]} is not what was saved (its checksum differs)"
            )
    converted = set()
    for name, tree in arrays.items():
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(items[name]), strict=True)
        converted |= {f"{x.dtype} to {like.dtype}" for x, like in pairs if x.dtype != like.dtype}
        # Containers without arrays, as Muon's have, come back as None.
        leaves = map(_as_dtype, *map(jax.tree.leaves, (tree, items[name], layouts[name])))
        arrays[name] = jax.tree.unflatten(jax.tree.structure(items[name]), leaves)
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
    return Restored(
        state, position["data"], position["metrics"], reference, tuple(sorted(converted))
    )


def _reference(position: Mapping[str, Any]) -> Reference | None:
    stored = position.get("frozen")
    return None if stored is None else Reference(stored["checkpoint"], dict(stored["checksums"]))


def stored_names(checkpoint: str | Path, item: Literal["params", "memory"]) -> dict[str, int]:
    """The checksums of a checkpoint's arrays by path, those of frozen weights included.

    Args:
      checkpoint: `RUN/checkpoints/STEP`.
      item: slow weights, or memories by layer.
    """
    position = _read_json(Path(checkpoint).absolute())
    names = dict(position["checksums"].get(item, {}))
    reference = _reference(position)
    if item == "params" and reference is not None:
        names |= reference.checksums
    return names


def read_arrays(
    checkpoint: str | Path,
    wanted: Mapping[str, Any],
    *,
    item: Literal["params", "optimizer", "memory"],
) -> dict[str, jax.Array]:
    """Reads some arrays of a checkpoint or of those that it refers to, and checks their checksums.

    The bytes of other arrays are not read.

    Args:
      checkpoint: `RUN/checkpoints/STEP`.
      wanted: `jax.ShapeDtypeStruct` with a sharding for each array, by path.
      item: slow weights, the optimiser's state, or memories by layer.

    Raises:
      ValueError: there is no such checkpoint; an array is missing or damaged, or differs in shape
        or dtype.
      UnreadBaseError: arrays lie in a bucket, and cannot be read.
    """
    path = Path(checkpoint).absolute()
    return {
        name: _as_dtype(x, wanted[name], wanted[name].sharding)
        for name, x in _read_stored(path, wanted, item).items()
    }


def _read_stored(path: Path, wanted: Mapping[str, Any], item: str) -> dict[str, jax.Array]:
    """`read_arrays` in the dtypes in which they are stored."""
    if not path.is_dir():
        raise ValueError(f"{path}, which holds frozen weights, does not exist; put it back")
    position = _read_json(path)
    stored = position["checksums"].get(item, {})
    here = {name: like for name, like in wanted.items() if name in stored}
    elsewhere = {name: like for name, like in wanted.items() if name not in stored}
    found = _read_some(path / item, here) if here else {}
    actual = checksums(found)
    wrong = [name for name in found if actual[name] != stored[name]]
    if wrong:
        raise ValueError(f"{path}: {wrong[0]} is not what was saved (its checksum differs)")
    if elsewhere:
        reference = _reference(position)
        if reference is None or item != "params":
            raise ValueError(f"{path} has no {next(iter(elsewhere))}")
        with _referred(reference.checkpoint) as base:
            found |= _read_stored(base, elsewhere, item)
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
            folder = held.enter_context(local_copy(run, checkpoints=int(step)))
        except (OSError, ValueError) as error:
            raise UnreadBaseError(f"Frozen weights lie in {checkpoint}: {error}") from error
        found = folder / "checkpoints" / step
        if not found.is_dir():
            raise UnreadBaseError(
                f"{checkpoint}, which holds frozen weights, does not exist or is damaged; put it "
                "back"
            )
        yield found


def _read_params(path: Any, abstract: Any, layout: Any, reference: Reference) -> Any:
    """Slow weights, of which the frozen ones are read from another checkpoint."""
    like = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), abstract, layout
    )
    named = named_leaves(like)
    frozen = {name: named[name] for name in reference.checksums}
    own = {name: x for name, x in named.items() if name not in frozen}
    with _referred(reference.checkpoint) as base:
        found = _read_stored(base, frozen, "params")
    found |= _read_stored(Path(path), own, "params")
    return jax.tree.unflatten(jax.tree.structure(abstract), [found[name] for name in named])


def _read_some(path: Any, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Some arrays of an item, in the dtypes in which they are stored; no other array is read."""
    handler = ocp.PyTreeCheckpointHandler()
    try:
        targets = {}
        there = named_leaves(handler.metadata(path).tree)
        for name, ours in wanted.items():
            stored = there[name]
            if ours.shape != stored.shape or not _converts(stored.dtype, ours.dtype):
                raise ValueError(
                    f"{path}/{name} is {stored.dtype}{list(stored.shape)}; the model's is "
                    f"{ours.dtype}{list(ours.shape)}"
                )
            targets[name] = jax.ShapeDtypeStruct(ours.shape, stored.dtype, sharding=ours.sharding)
        targets = nested(targets)
        how = ocp.checkpoint_utils.construct_restore_args(targets)
        args = ocp.args.PyTreeRestore(targets, restore_args=how, partial_restore=True)
        read = named_leaves(handler.restore(path, args=args))
    finally:
        handler.close()
    return {name: read[name] for name in wanted}


def _read_arrays(path: Any, abstract: Any, layout: Any) -> Any:
    """An item's arrays; of `memory`, as many groups as were saved.

    Uses Orbax's handlers: unlike its checkpointers, they do not wait for other processes.
    """
    handler = ocp.StandardCheckpointHandler()

    def target(x: Any, sharding: Any, stored: Any) -> Any:
        shape, dtype = x.shape, x.dtype
        if saved is not None and saved != shape[0]:
            shape, sharding = (saved, *shape[1:]), all_groups(sharding)
        if stored is not None and _converts(stored.dtype, dtype):
            dtype = stored.dtype
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    try:
        saved, there = None, named_leaves(handler.metadata(path).tree)
        if path.name == "memory":
            saved, there = next(iter(there.values())).shape[0], {}
        like = [there.get(name) for name in named_leaves(abstract)]
        targets = jax.tree.unflatten(
            jax.tree.structure(abstract),
            map(target, jax.tree.leaves(abstract), jax.tree.leaves(layout), like),
        )
        args = ocp.args.StandardRestore(nested(targets))
        read = handler.restore(path, args=args)
    finally:
        handler.close()
    return _like(abstract, read)


def _converts(stored: Any, wanted: Any) -> bool:
    """Whether an array may be read in another dtype than it is stored in."""
    real = jnp.issubdtype(stored, jnp.floating) and jnp.issubdtype(wanted, jnp.floating)
    return stored == wanted or real


def _as_dtype(x: jax.Array, like: Any, place: Any) -> jax.Array:
    """The array in the dtype of `like`, on the devices of `place`."""
    return x if x.dtype == like.dtype else _cast(like.dtype, place)(x)


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


def _read_json(path: Any) -> dict[str, Any]:
    """The checkpoint's item `position`: the values that are not arrays."""
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
