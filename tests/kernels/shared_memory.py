"""Follows the accesses of a Mosaic GPU kernel to shared memory, in the order of its program.

JAX's interpreter treats a warpgroup as one thread, so it cannot see that a barrier between two of
its warps is missing. Here every warp may be ahead of the others up to the next barrier, tensor
cores read until they are waited for, and so do asynchronous copies. Numbers that choose a place, a
turn of a loop or a branch are computed; arrays are not.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax._src.state.indexing import NDIndexer, Slice
from jax._src.state.types import TransposeTransform
from jax.extend.core import Literal

Region = tuple[tuple[float, float], ...]
_EVERYWHERE: Region = ()
_UNKNOWN = object()
_ALL = "stored", "loaded", "multiplied", "arriving", "leaving"


@dataclass(eq=False)
class Buffer:
    """Shared memory of one name, and the accesses to it that other warps may not have finished."""

    name: str
    stored: list[Region] = field(default_factory=list)
    unfenced: list[Region] = field(default_factory=list)
    """Stored, and not yet visible to tensor cores and copies."""
    loaded: list[Region] = field(default_factory=list)
    multiplied: list[Region] = field(default_factory=list)
    """Read by products that nothing has waited for."""
    arriving: dict[Region, Any] = field(default_factory=dict)
    """Written by copies, and the barrier that each arrives at."""
    leaving: list[Region] = field(default_factory=list)
    ended: frozenset[str] = frozenset()
    """Buffers whose scope had ended when that of this one began: it may lie in their place."""


@dataclass(frozen=True)
class Access:
    """One access of a warpgroup, and which barriers it had waited for and arrived at before."""

    what: str
    buffer: Buffer
    region: Region
    writes: bool
    waited: frozenset
    arrived: frozenset
    received: frozenset
    """Barriers of copies that its warpgroup had waited for, each with the number of the wait."""
    lands: Any = None
    """Of a copy: the barrier that it arrives at, with the number of the wait that is for it."""

    def precedes(self, other: "Access") -> bool:
        """Whether its warpgroup has since arrived at a barrier that the other has waited for, or it
        is a copy that the other has waited for."""
        return not other.waited <= self.arrived or self.lands in other.received

    def conflicts(self, other: "Access") -> bool:
        if not (self.writes or other.writes):
            return False
        if self.buffer.name == other.buffer.name:
            return _overlap(self.region, other.region)
        return self.buffer.name in other.buffer.ended or other.buffer.name in self.buffer.ended


def barriers_missing(kernel: Any, *, axes: dict[str, int] | None = None) -> list[str]:
    """The accesses of a warpgroup that lack a barrier or a wait, a line each.

    Args:
      kernel: the `mpmd_map` equation of a Mosaic GPU kernel.
      axes: the program's place by the names of the grid's and the warpgroups' axes; 0 if left out.
    """
    return _walk(kernel, axes or {}).missing


def unordered_accesses(kernel: Any, *, axis: str) -> list[str]:
    """Pairs of accesses of two warpgroups, numbers 0 and 1 of `axis`, that no barrier orders.

    A barrier must be used once, and every warpgroup must arrive at it.
    """
    one, other = (_walk(kernel, {axis: i}).accesses for i in range(2))
    pairs = (x for x in itertools.product(one, other) if x[0].conflicts(x[1]))
    return [
        f"{a.what} of {a.buffer.name} and {b.what} of {b.buffer.name}"
        for a, b in pairs
        if not (a.precedes(b) or b.precedes(a))
    ]


def _walk(kernel: Any, axes: dict[str, int]) -> "_Walk":
    automatic = not kernel.params["compiler_params"].unsafe_no_auto_barriers
    (jaxpr,) = kernel.params["jaxprs"]
    walk = _Walk(axes, automatic=automatic)
    walk.run(jaxpr, [_UNKNOWN] * len(jaxpr.invars), [_UNKNOWN] * len(jaxpr.constvars))
    return walk


class _Walk:
    def __init__(self, axes: dict[str, int], *, automatic: bool):
        self.axes, self.automatic = axes, automatic
        self.missing: list[str] = []
        self.buffers: list[Buffer] = []
        """Also those whose scope has ended: others may lie in their place."""
        self.scopes: list[list[Buffer]] = [[]]
        self.count = itertools.count()
        self.accesses: set[Access] = set()
        self.waited: frozenset = frozenset()
        self.arrived: frozenset = frozenset()
        self.received: frozenset = frozenset()

    def run(self, jaxpr: Any, arguments: Sequence[Any], constants: Sequence[Any]) -> list[Any]:
        known = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*arguments, *constants], strict=True))

        def read(var: Any) -> Any:
            return var.val if isinstance(var, Literal) else known[var]

        for equation in jaxpr.eqns:
            results = self.equation(equation, [read(x) for x in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def equation(self, equation: Any, values: list[Any]) -> list[Any]:
        name, params = equation.primitive.name.removesuffix("_p"), equation.params
        act = getattr(self, f"_{name}", None)
        if act is not None:
            return act(equation, values) or [_UNKNOWN] * len(equation.outvars)
        if "jaxpr" in params or "branches" in params or "jaxprs" in params:
            raise NotImplementedError(f"{name} has an inner program that is not followed")
        refs = [x for x in values if isinstance(x, Buffer)]
        assert not refs, f"{name} of shared memory is not followed"
        scalars = all(not np.shape(x) for x in values if x is not _UNKNOWN)
        if any(x is _UNKNOWN for x in values) or not scalars or equation.primitive.multiple_results:
            return [_UNKNOWN] * len(equation.outvars)
        return [np.asarray(equation.primitive.bind(*values, **params))]

    # What moves control.

    def _jit(self, equation: Any, values: list[Any]) -> list[Any]:
        return self.run(equation.params["jaxpr"].jaxpr, values, equation.params["jaxpr"].consts)

    def _scan(self, equation: Any, values: list[Any]) -> list[Any]:
        inner, turns = equation.params["jaxpr"], equation.params["length"]
        results = [x.aval.shape for x in equation.outvars]
        assert results == [x.shape for x in inner.out_avals], "a scan over arrays is not followed"
        fixed = values[: len(values) - len(results)]
        carry = values[len(fixed) :]
        for _ in range(turns):
            carry = self.run(inner.jaxpr, [*fixed, *carry], inner.consts)
        return carry

    def _while(self, equation: Any, values: list[Any]) -> list[Any]:
        raise NotImplementedError("a loop whose end is not known is not followed")

    def _cond(self, equation: Any, values: list[Any]) -> list[Any]:
        which, *operands = values
        assert which is not _UNKNOWN, "a branch that depends on an array is not followed"
        branch = equation.params["branches"][int(which)]
        return self.run(branch.jaxpr, operands, branch.consts)

    def _axis_index(self, equation: Any, values: list[Any]) -> list[Any]:
        return [np.int32(self.axes.get(equation.params["axis_name"], 0))]

    def _run_scoped(self, equation: Any, values: list[Any]) -> list[Any]:
        inner = equation.params["jaxpr"]
        self.scopes.append([])
        refs = [self.allocated(x.aval) for x in inner.invars]
        results = self.run(inner, refs, values)
        for buffer in self.scopes.pop():
            if buffer.arriving or buffer.multiplied:
                self.missing.append(f"{buffer.name} is freed before it is done with")
        return results

    def _run_state(self, equation: Any, values: list[Any]) -> list[Any]:
        self.run(equation.params["jaxpr"], values, [])
        self._wgmma_wait(equation, values)  # Its end waits for the sums that it began with.
        return [x if isinstance(x, Buffer) else _UNKNOWN for x in values]

    def allocated(self, aval: Any) -> Any:
        if not str(aval).startswith("Ref<smem>"):
            return _UNKNOWN
        name = f"tile {next(self.count)} {aval}"
        if "barrier" in str(aval):
            return name
        living = set(map(id, itertools.chain(*self.scopes)))
        ended = [x for x in self.buffers if id(x) not in living]
        buffer = Buffer(name, ended=frozenset(x.name for x in ended))
        for other in ended:
            buffer.loaded += [_EVERYWHERE] * bool(other.loaded)
            buffer.stored += [_EVERYWHERE] * bool(other.stored)
            buffer.leaving += [_EVERYWHERE] * bool(other.leaving)
        self.buffers.append(buffer)
        self.scopes[-1].append(buffer)
        return buffer

    # What accesses shared memory, or waits.

    def barrier(self) -> None:
        for buffer in self.buffers:
            buffer.stored.clear()
            buffer.loaded.clear()

    def check(self, equation: Any, place: tuple[Buffer, Region], *kinds: str) -> None:
        """Notes an access, and what of `kinds` it would meet."""
        buffer, region = place
        if equation.primitive.name != "copy_gmem_to_smem":
            self.note(equation, place, writes=kinds == _ALL)
        for kind in kinds:
            if any(_overlap(region, other) for other in getattr(buffer, kind)):
                frames = equation.source_info.traceback.frames
                where = [f"{f.file_name}:{f.line_num}" for f in frames if "gpu_" in f.file_name]
                self.missing.append(
                    f"{equation.primitive} of {buffer.name}, {region}, {kind} before; {where}"
                )

    def note(
        self, equation: Any, place: tuple[Buffer, Region], *, writes: bool, lands: Any = None
    ) -> None:
        state = self.waited, self.arrived, self.received
        self.accesses.add(Access(str(equation.primitive), *place, writes, *state, lands))

    def turn(self, barrier: Any) -> tuple[Any, int]:
        """A barrier of copies, and how often it has been waited for."""
        return barrier, sum(one == barrier for one, _ in self.received)

    def first_operand(self, equation: Any, values: list[Any]) -> Iterator[tuple[Buffer, Region]]:
        """The first operand, if it is shared memory, and the place that is meant."""
        ref, *leaves = values
        if isinstance(ref, Buffer):
            yield _place(ref, equation.params["tree"], leaves)

    def _get(self, equation: Any, values: list[Any]) -> None:
        for buffer, region in self.first_operand(equation, values):
            self.check(equation, (buffer, region), "stored", "arriving")
            buffer.loaded.append(region)

    _load = _get

    def _swap(self, equation: Any, values: list[Any]) -> None:
        ref, _, *rest = values
        if self.automatic:
            self.barrier()
        for buffer, region in self.first_operand(equation, [ref, *rest]):
            self.check(equation, (buffer, region), *_ALL)
            buffer.stored.append(region)
            buffer.unfenced.append(region)
        if self.automatic:
            self.barrier()

    def _commit_smem(self, equation: Any, values: list[Any]) -> None:
        del equation, values
        self.barrier()
        for buffer in self.buffers:
            buffer.unfenced.clear()

    def _wgmma_ref(self, equation: Any, values: list[Any]) -> None:
        refs = dict(zip(("acc", "a", "b"), values, strict=False))
        places = _places(equation, refs, values[3:], "{}_transforms_tree")
        for place in places.values():
            self.check(equation, place, "stored", "unfenced", "arriving")
            place[0].multiplied.append(place[1])

    def _wgmma_wait(self, equation: Any, values: list[Any]) -> None:
        del equation, values
        for buffer in self.buffers:
            buffer.loaded += buffer.multiplied
            buffer.multiplied.clear()

    _wgmma_accumulator_deref = _wgmma_wait

    def _copy_gmem_to_smem(self, equation: Any, values: list[Any]) -> None:
        if self.automatic:
            self.barrier()
        refs = dict(zip(("src", "dst", "barrier"), values, strict=False))
        places = _places(equation, refs, values[3:], "{}_transforms_treedef")
        self.check(equation, places["dst"], *_ALL)
        buffer, region = places["dst"]
        lands = self.turn(places["barrier"])
        self.note(equation, places["dst"], writes=True, lands=lands)
        buffer.arriving[region] = places["barrier"]

    def _barrier_wait(self, equation: Any, values: list[Any]) -> None:
        waited = _place(values[0], equation.params["transforms_treedef"], values[1:])
        if waited in self.arrived:  # Of one warpgroup alone this orders nothing.
            self.waited |= {waited}
            return
        turn = self.turn(waited)
        self.received |= {turn}
        for buffer in self.buffers:
            for region in [x for x, barrier in buffer.arriving.items() if barrier == waited]:
                del buffer.arriving[region]
                self.note(equation, (buffer, region), writes=True, lands=turn)

    def _barrier_arrive(self, equation: Any, values: list[Any]) -> None:
        barrier = _place(values[0], equation.params["transforms_treedef"], values[1:])
        assert barrier not in self.arrived, "a barrier that is used again is not followed"
        self.arrived |= {barrier}

    def _copy_smem_to_gmem(self, equation: Any, values: list[Any]) -> None:
        refs = dict(zip(("src", "dst"), values, strict=False))
        places = _places(equation, refs, values[2:], "{}_transforms_treedef")
        self.check(equation, places["src"], "stored", "unfenced", "arriving")
        places["src"][0].leaving.append(places["src"][1])

    def _wait_smem_to_gmem(self, equation: Any, values: list[Any]) -> None:
        del equation, values  # The kernels only wait for all copies.
        for buffer in self.buffers:
            buffer.leaving.clear()
        self.barrier()


def _places(equation: Any, refs: dict[str, Any], leaves: list[Any], tree: str) -> dict[str, Any]:
    """The places of operands whose transforms' leaves follow each other."""
    found = {}
    for name, ref in refs.items():
        structure = equation.params[tree.format(name)]
        count = 0 if structure is None else structure.num_leaves
        if ref is not _UNKNOWN:
            found[name] = _place(ref, structure, leaves[:count])
        leaves = leaves[count:]
    return found


def _place(ref: Any, structure: Any, leaves: Sequence[Any]) -> tuple[Any, Region]:
    """The buffer or barrier, and its region: for each axis the first place and that after the last.

    Tiles are given by rows and columns; an index that is not known means the whole axis.
    """
    transforms = () if structure is None else jax.tree.unflatten(structure, leaves)
    axes: list[int] = []  # Axes of the buffer that are left, in the order of the view.
    region: list[tuple[float, float]] = []
    for transform in transforms:
        if isinstance(transform, TransposeTransform):
            order = transform.permutation
            axes = [axes[i] for i in order] if axes else list(order)
        elif isinstance(transform, NDIndexer):
            if not region:
                axes = axes or list(range(len(transform.shape)))
                sizes = dict(zip(axes, transform.shape, strict=True))
                region = [(0, sizes[axis]) for axis in range(len(axes))]
            left = []
            for axis, index in zip(axes, transform.indices, strict=True):
                start, _ = region[axis]
                first, size = (index.start, index.size) if isinstance(index, Slice) else (index, 1)
                if first is not _UNKNOWN:
                    region[axis] = (start + int(first), start + int(first) + size)
                if isinstance(index, Slice):
                    left.append(axis)
            axes = left
    return ref, tuple(region) or _EVERYWHERE


def _overlap(one: Region, other: Region) -> bool:
    pairs = zip(one, other, strict=False)  # `_EVERYWHERE` has no axes.
    return all(a < d and c < b for (a, b), (c, d) in pairs)
