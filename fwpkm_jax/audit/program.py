"""What the audit asks of a program that keeps a memory, and the lines that need nothing else.

A program of any origin, such as a model in PyTorch, is audited through an adapter with these four
functions: `program_lines(Adapter(...), tokens, chunk_sizes=[64])`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fwpkm_jax.audit.causality import Look, causality
from fwpkm_jax.audit.design import ROUNDING, Path, boundaries
from fwpkm_jax.audit.isolation import apart, forgotten
from fwpkm_jax.audit.lines import Line, attempt, difference_of, judged

MOST_CALLS = 16
"""Of one way of reading, with texts that are changed from different positions on."""
MOST_STEPS = 512
"""Single tokens that are read one after the other; what lies between is read in one piece."""
_PIECES = 6  # Of a text, beside what is left over.


class Program(Protocol):
    """A program that reads rows side by side, each with a memory of its own.

    A state is whatever the program likes: memories, caches, a queue, positions. `read` leaves the
    state that it is given as it was, so that one can go back to it.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    def start(self, rows: int, length: int) -> Any:
        """The state of rows that have read nothing, with room for `length` tokens each."""
        ...

    def read(self, state: Any, tokens: np.ndarray, *, write: bool) -> tuple[np.ndarray, Any]:
        """Reads `tokens` int32 `[rows, piece]` behind what was read before.

        Args:
          state: left as it is.
          tokens: the same number of rows as in `start`.
          write: False leaves the memory as it is, also in later calls.

        Returns:
          Logits float32 `[rows, piece, vocab]`, and the state behind the piece.
        """
        ...

    def memory(self, state: Any) -> Any:
        """The memories of a state, a pytree of arrays `[rows, ...]`; empty if there are none."""
        ...

    def restart(self, state: Any) -> Any:
        """The state with its memories alone: empty caches and queues, at position 0."""
        ...


class Way(NamedTuple):
    """A way of reading, of which two lines judge whether it looks ahead and whether rows are apart.

    Attributes:
      path: the path of a program.
      positions: see `causality`; empty: no such line.
      together: adjacent rows that may see each other, because they share a memory.
      owners: see `apart`; None: by `together`.
      rows: how many are read; None: all. Of one row there is no line of rows.
    """

    path: Callable[[Any], Path]
    positions: Sequence[int] = ()
    together: int = 1
    owners: np.ndarray | None = None
    rows: int | None = None


def way_lines(
    program: Any,
    ways: Mapping[str, Way],
    tokens: np.ndarray,
    *,
    rounding: float,
    exact: bool = True,
    cause: Callable[[Way], Callable[[Look], str]],
) -> Iterator[Line]:
    """The lines of ways of reading; the arguments are those of `program_lines`."""
    for name, way in ways.items():
        texts = tokens[: way.rows]
        options: dict[str, Any] = {
            "vocab_size": program.vocab_size,
            "rounding": rounding,
            "exact": exact,
        }

        def judge(check: Callable[..., Line], **more: Any) -> Line:
            return check(name, way.path(program), texts, **options, **more)  # noqa: B023

        if way.positions:
            more = {"positions": way.positions, "rows_apart": True, "together": way.together}
            check = partial(judge, causality, cause=cause(way), **more)
            yield attempt("causality", name, check)
        if len(texts) > 1:
            owners = np.arange(len(texts)) // way.together if way.owners is None else way.owners
            yield attempt("isolation", name, partial(judge, apart, owners=owners))


def program_lines(
    program: Program,
    tokens: np.ndarray,
    *,
    chunk_sizes: Sequence[int],
    rounding: float = ROUNDING,
    exact: bool = True,
    agreement: float = 1e-3,
    cause: Callable[[Way], Callable[[Look], str]] = lambda way: lambda look: "",
) -> Iterator[Line]:
    """The lines of a program, each when it is ready: causality, users apart, and ways back.

    Args:
      program: see `Program`.
      tokens: ids int32 `[rows, length]`, rows as long as those that it was trained on.
      chunk_sizes: tokens per write, whose edges are looked at first where not all can be.
      rounding: see `causality`.
      exact: see `causality`.
      agreement: share of the logits' spread, or of 1 nat where it is less, by which pieces of
        other sizes may differ, as they are computed in another order.
      cause: given a way of reading, names the cause of a look ahead.
    """
    rows, length = tokens.shape
    every = boundaries(length, chunk_sizes, most=MOST_CALLS * rows)
    # What reads single tokens knows later ones only by what it keeps from call to call.
    few = boundaries(length, chunk_sizes, most=rows)
    alone = boundaries(length, chunk_sizes, most=MOST_CALLS)
    ways = {
        "stream at once": Way(partial(in_pieces, piece=length), every),
        "stream in pieces": Way(partial(in_pieces, piece=length // _PIECES), every),
        "token by token": Way(partial(in_pieces, piece=1), few),
        "one row alone": Way(partial(in_pieces, piece=length), alone, rows=1),
    }
    noisy = False
    for line in way_lines(program, ways, tokens, rounding=rounding, exact=exact, cause=cause):
        noisy |= bool(line.numbers.get("rounding"))
        yield line

    def logits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
        found = {
            name: way.path(program)(tokens[: way.rows])["logits"] for name, way in ways.items()
        }
        once = found.pop("stream at once")
        return {name: (one, once[: len(one)]) for name, one in found.items()}

    name = "ways of reading agree"
    yield attempt("causality", name, lambda: agree(name, logits(), allowed=agreement))
    backs = {"question aside": _aside, "emptied caches": _emptied}
    for name, check in backs.items():
        run = partial(check, program, tokens, rounding=rounding if noisy else 0.0)
        yield attempt("isolation", name, run)


def in_pieces(program: Program, *, piece: int) -> Path:
    """The path of a program that reads pieces: logits, and each row's memory behind them."""

    def path(tokens: np.ndarray) -> dict[str, Any]:
        return _read(program, program.start(*tokens.shape), tokens, piece=piece)[0]

    return path


def _read(
    program: Program, state: Any, tokens: np.ndarray, *, piece: int, write: bool = True
) -> tuple[dict[str, Any], Any]:
    """Logits and memory behind a text that is read on in pieces, and the state."""
    length = tokens.shape[1]
    ends = list(range(piece, length, piece))
    if len(ends) > MOST_STEPS:
        ends = ends[: MOST_STEPS // 2] + ends[-MOST_STEPS // 2 :]
    found, start = [], 0
    for end in [*ends, length]:
        logits, state = program.read(state, tokens[:, start:end], write=write)
        found.append(np.asarray(logits))
        start = end
    got = {"logits": np.concatenate(found, axis=1), "memory": copied(program.memory(state))}
    return got, state


def agree(name: str, pairs: Mapping[str, tuple[np.ndarray, np.ndarray]], *, allowed: float) -> Line:
    """The line of ways that must give equal logits, but for rounding.

    Args:
      name: of the line.
      pairs: by way, its logits and those of a reference.
      allowed: share of the reference's spread, or of 1 nat where it is less: in a model that
        hardly learned anything, rounding alone may choose between two slots.
    """
    found = {way: difference_of(*pair) for way, pair in pairs.items()}
    bounds = {way: allowed * max(1.0, float(np.std(one))) for way, (_, one) in pairs.items()}
    worst = max(found, key=lambda way: found[way] / bounds[way])
    good = found[worst] <= bounds[worst]
    text = (
        f"Logits of {', '.join(found)} equal those of one call within {found[worst]:.1g} (allowed "
        f"{bounds[worst]:.1g})."
        if good
        else f"{worst} gives logits that differ by {found[worst]:.2g} from those of one call "
        f"(allowed {bounds[worst]:.1g}): it reads something else, or in another order."
    )
    numbers = {"largest": found, "allowed": bounds}
    return Line(section="causality", name=name, verdict=judged(good), text=text, numbers=numbers)


def copied(tree: Any) -> Any:
    """NumPy copies: on a CPU `np.asarray` would be a view of a buffer that a call may reuse."""
    return jax.tree.map(np.array, tree)


def _aside(program: Program, tokens: np.ndarray, *, rounding: float) -> Line:
    """What is read without writing leaves memory and state as they were."""
    # A third each, so that both hold a write, in pieces of the size that was read before.
    piece = tokens.shape[1] // _PIECES
    kept, more = tokens[:, : 2 * piece], tokens[:, 2 * piece : 4 * piece]
    read = partial(_read, program, piece=piece)
    _, state = read(program.start(*tokens.shape), kept)
    held, (never, _) = copied(program.memory(state)), read(state, more)
    _, asked = read(state, more[:, ::-1], write=False)
    back, _ = read(state, more)
    _, written = read(state, more[:, ::-1])
    further, _ = read(written, more)
    return forgotten(
        "question aside",
        {"held": copied(program.memory(asked)), "read on": back},
        {"held": held, "read on": never},
        {"held": copied(program.memory(written)), "read on": further},
        what="a question aside",
        rounding=rounding,
    )


def _emptied(program: Program, tokens: np.ndarray, *, rounding: float) -> Line:
    """Without writing, a state whose caches were emptied is a new one; memories are kept."""
    # A third each, so that both hold a write, in pieces of the size that was read before.
    piece = tokens.shape[1] // _PIECES
    kept, more = tokens[:, : 2 * piece], tokens[:, 2 * piece : 4 * piece]
    read = partial(_read, program, piece=piece)
    never, _ = read(program.start(*tokens.shape), more, write=False)
    _, state = read(program.start(*tokens.shape), kept, write=False)
    further, _ = read(state, more, write=False)
    back, _ = read(program.restart(state), more, write=False)
    _, written = read(program.start(*tokens.shape), kept)
    held = copied(program.memory(written))
    after = copied(program.memory(program.restart(written)))
    return forgotten(
        "emptied caches",
        {"held": after, "read": back},
        {"held": held, "read": never},
        {"held": held, "read": further},
        what="emptying all caches",
        rounding=rounding,
    )
