"""Whether users stay apart, and whether what was forgotten is gone; for any program."""

from typing import Any

import numpy as np

from fwpkm_jax.audit.design import ROUNDING, Noise, Path, antichain, arrays_of, other_tokens
from fwpkm_jax.audit.lines import Line, differences, gaps, judged


def apart(
    name: str,
    path: Path,
    tokens: np.ndarray,
    *,
    vocab_size: int,
    owners: np.ndarray | None = None,
    rounding: float = ROUNDING,
    exact: bool = True,
) -> Line:
    """The line of users: pass if what each has is the same beside any text of the others.

    The users' whole texts are changed by `design.antichain`, so a leak from any user to any other
    one shows, at any place.

    Args:
      name: of the path.
      path: see `design.Path`; all that it gives counts.
      tokens: ids `[rows, length]`.
      vocab_size: number of ids.
      owners: int, the user whose tokens a row `[rows]` or a position `[rows, length]` holds, -1 for
        padding, which must move no one; of what the path gives beside the logits, a row is then
        compared where none of its users has another text. None: each row is a user.
      rounding: see `causality`; of each array by itself.
      exact: see `causality`.

    Example:
      >>> shared = lambda tokens: np.eye(4)[tokens] + tokens[1].mean()  # All see the second row.
      >>> apart("users", shared, np.zeros((3, 5), int), vocab_size=4).numbers["leaks_to"]
      [0, 2]
    """
    owners = np.arange(len(tokens)) if owners is None else owners
    cells = owners if owners.ndim == 2 else np.broadcast_to(owners[:, None], tokens.shape)
    users = int(owners.max()) + 1
    calls = [call[cells] & (cells >= 0) for call in antichain(users)]
    if (cells < 0).any():
        calls.append(cells < 0)
    first, others = arrays_of(path, tokens), other_tokens(tokens, vocab_size)
    moved = []
    for changed in calls:
        result = arrays_of(path, np.where(changed, others, tokens))
        moved.append(
            {
                where: gaps(mine, result[where], axes=2 if where == "logits" else 1)
                for where, mine in first.items()
            }
        )
    again = arrays_of(path, tokens)
    refused, bits, seen, leaks = "", True, np.zeros(users, bool), []
    for where, before in first.items():
        noise = Noise.of(before, again[where], rounding, exact=exact)
        refused, bits = refused or noise.refusal(), bits and not noise.allowed
        for changed, one in zip(calls, moved, strict=True):
            by_cell = where == "logits"
            owner = cells if by_cell else cells.max(1)
            own = changed if by_cell else (changed & (cells >= 0)).any(1)
            far = (one[where] > noise.allowed) & (owner >= 0)
            seen[owner[own & far]] = True
            leaks += [
                (float(one[where][place]), int(owner[place]), where)
                for place in map(tuple, np.argwhere(far & ~own))
            ]
    if refused:
        text = refused
    elif leaks:
        largest, user, where = max(leaks)
        text = (
            f"What others read changes user {user}'s {where} by {largest:.2g}: users share a "
            "memory, or a state."
        )
    elif not seen.all():
        blind = int(np.flatnonzero(~seen)[0])
        text = f"User {blind}'s own text changes nothing that is looked at, so this cannot fail."
    else:
        how = "no bit of" if bits else "nothing beyond rounding in"
        text = (
            f"In {len(calls)} calls that tell any two of {users} users apart, another text of one "
            f"changes {how} what another one has, over {tokens.shape[1]:,} tokens."
        )
    return Line(
        section="isolation",
        name=name,
        verdict=judged(not refused and not leaks and bool(seen.all())),
        text=text,
        numbers={
            "users": users,
            "calls": len(calls),
            "leaks_to": sorted({user for _, user, _ in leaks}),
        },
    )


def forgotten(
    name: str, back: Any, never: Any, further: Any, *, what: str, rounding: float = 0.0
) -> Line:
    """The line of a way back: pass if all is as if nothing more had ever been read.

    Args:
      name: of the way back.
      back: a pytree of arrays after going back.
      never: the same where nothing more was read.
      further: the same after reading more, which must differ.
      what: the way back, for the text.
      rounding: share of an array's spread that does not count, where a device adds in no fixed
        order.
    """
    found, control = (differences(one, never, rounding=rounding) for one in (back, further))
    if not control:
        text = "Reading more changed nothing, so this check cannot fail."
    elif not found:
        how = "all is within rounding" if rounding else "every bit is"
        text = f"After {what} {how} as if nothing more had been read."
    else:
        where, largest = next(iter(found.items()))
        text = (
            f"After {what}, {where} still differs by {largest:.2g} from one that never read more: "
            "it is no reset."
        )
    return Line(
        section="isolation",
        name=name,
        verdict=judged(bool(control) and not found),
        text=text,
        numbers={"where": list(found)},
    )
