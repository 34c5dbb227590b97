"""Users who decode side by side, each with a memory of its own, and come and go between steps.

A seat is a row of the batch. Every row is computed apart from the others, by one compiled program,
whoever sits beside it: a user's tokens, logits and memory are the same bit for bit in any seat, at
any time, alone or in company. A user who joins has read its prompt alone. Joining, leaving and
decoding compile once for all users.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from fwpkm_jax.core.checks import check_key
from fwpkm_jax.core.chunks import Memory, map_own, put_shared, shares, take_shared
from fwpkm_jax.generation.generate import (
    NEW_AT_ONCE,
    Aside,
    check_stop_ids,
    decode,
    generate,
    with_memory,
)
from fwpkm_jax.generation.prompts import attention_room
from fwpkm_jax.generation.sampling import Sampling
from fwpkm_jax.generation.state import GenerationState, grow, init_generation
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.overlays import (
    check_bases,
    fork_memory,
    overlay_use,
    refuse_lost,
    to_overlay,
    with_capacity,
)


class Seats(NamedTuple):
    """Users who decode side by side.

    Attributes:
      state: of all seats, each a sequence with a memory of its own. What it holds of an empty seat
        has no meaning.
      keys: of each user's draws.
      draws: whether the user has a key; on the host.
      taken: whether a user sits there; on the host.
      newcomer: the state of one user who has read nothing yet.
    """

    state: GenerationState
    keys: Key[Array, " seats"]
    draws: Bool[np.ndarray, " seats"]
    taken: Bool[np.ndarray, " seats"]
    newcomer: GenerationState


class Joined(NamedTuple):
    """The seats after a user joined, and the user's seat."""

    seats: Seats
    seat: int


class Left(NamedTuple):
    """The seats after a user left, and the user's state, `batch` 1."""

    seats: Seats
    user: GenerationState


class Step(NamedTuple):
    """The result of `step`.

    Attributes:
      seats: after these tokens.
      tokens: token ids `[seats, tokens]`; -1 in empty seats and after a user's stop token.
      log_probs: of each token in nats, as in `GenerationOutput`; 0 where `tokens` is -1, NaN where
        a user failed.
      waiting: whether a user can go on, `[seats]`; False in empty seats, after a stop token and
        after a failure.
    """

    seats: Seats
    tokens: Int[np.ndarray, "seats tokens"]
    log_probs: Float[np.ndarray, "seats tokens"]
    waiting: Bool[np.ndarray, " seats"]

    @property
    def failed(self) -> Bool[np.ndarray, " seats"]:
        """Whether each user ended because its log-probabilities were not finite, `[seats]`."""
        return np.any(np.isnan(self.log_probs), axis=1)


def open_seats(
    model: LanguageModel,
    base: dict[str, Memory],
    *,
    seats: int,
    capacity: int | None,
    max_length: int,
    max_chunk_size: int | None = None,
) -> Seats:
    """Empty seats.

    Args:
      model: the language model, on one device.
      base: the memory that every user begins with, leaves `[1, ...]`, as
        `LanguageModel.init_memory` makes or a run holds it.
      seats: most users at a time, at least 2: products of a single row are computed in another
        order, so that one seat would give other last bits than many.
      capacity: slots of each layer that a user can write, kept beside the base, which is there once
        (`fwpkm_jax.overlays`). None: a whole memory in each seat, which every rule can have.
      max_length: most tokens, prompts and answers together, that full attention keeps of a user.
      max_chunk_size: as in `init_generation`.

    Raises:
      ValueError: there are fewer than 2 seats, or the rule has no overlay.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from fwpkm_jax import FastWeightConfig, FwPKM, LanguageModel, ModelConfig
      >>> from fwpkm_jax.generation import join, leave, open_seats, step
      >>> rule = FwPKM(num_subkeys=8, key_dim=8, value_dim=8, top_k=2)
      >>> config = ModelConfig(
      ...     vocab_size=32, model_dim=8, mlp_dim=8, mixers=("retnet",), memory_layers=(0,),
      ...     fast_weight=FastWeightConfig(rule=rule, chunk_size=4),
      ... )
      >>> model = LanguageModel(config, rngs=nnx.Rngs(0))
      >>> base = model.init_memory(jax.random.key(1))
      >>> seats = open_seats(model, base, seats=4, capacity=32, max_length=100)
      >>> seats, alice = join(model, seats, [1, 2, 3])
      >>> seats, tokens, *_ = step(model, seats, tokens=2)
      >>> tokens.shape, (tokens[alice] >= 0).all().item()
      ((4, 2), True)
      >>> seats, user = leave(seats, alice)  # The next call of `join` takes the user back.
      >>> user.num_read.tolist()
      [5]
    """
    if seats < 2:
        raise ValueError(f"seats={seats} must be at least 2; with one, call generate.")
    if any(x.shape[0] != 1 for x in jax.tree.leaves(base)):
        raise ValueError(
            "base holds several memories; give one, as overlays.take_users(base, [0])."
        )
    if capacity is not None:
        base = fork_memory(model, base, users=1, capacity=capacity)
    newcomer = init_generation(
        model, base, batch=1, max_length=max_length, max_chunk_size=max_chunk_size
    )
    state = map_own(lambda x: jnp.repeat(x, seats, axis=0), newcomer)
    return Seats(
        state=state._replace(finished=jnp.ones_like(state.finished)),
        keys=jax.random.split(jax.random.key(0), seats),
        draws=np.zeros((seats,), bool),
        taken=np.zeros((seats,), bool),
        newcomer=newcomer,
    )


def join(
    model: LanguageModel,
    seats: Seats,
    prompt: Sequence[int] | np.ndarray | None,
    *,
    user: GenerationState | None = None,
    rng: jax.Array | None = None,
    piece_length: int = 512,
) -> Joined:
    """Lets a user sit down on the first empty seat; all others go on as they were.

    Args:
      model: the language model.
      seats: before; cannot be used again.
      prompt: token ids, which the user reads alone before it sits down; None: the user goes on
        behind what it has read, also behind a stop token.
      user: state of one sequence, from `leave`, `generate` or `memories.load`; after a prompt it
        cannot be used again. Its memory lies over the base of these seats or is private. None: a
        new user with the base as its memory.
      rng: key of the user's draws, as in `generate`; required by `step` with a temperature.
      piece_length: as in `generate`.

    Raises:
      ValueError: all seats are taken, the state does not fit the seats, or there is neither a
        prompt nor a token read before.
    """
    empty = np.flatnonzero(~seats.taken)
    if not empty.size:
        raise ValueError(f"All {len(seats.taken)} seats are taken; let a user leave first.")
    if rng is not None:
        check_key(rng)
    newcomer = seats.newcomer
    found = newcomer if user is None else _fitting(model, user, newcomer)
    if prompt is not None:
        found = generate(
            *(model, [prompt], found),
            max_new_tokens=0,
            piece_length=piece_length,
            keep_state=user is None,
        ).state
    else:  # Also behind a stop token, which `generate` takes as the end.
        found = found._replace(finished=jnp.zeros_like(found.finished))
    if not int(found.num_read[0]):
        raise ValueError("A user needs a token to continue from; give it a prompt.")
    seat = int(empty[0])
    state, shared = take_shared(seats.state)
    key = jax.random.key(0) if rng is None else jax.random.fold_in(rng, 0)  # As in `generate`.
    state, keys = _sit_down((state, seats.keys), (take_shared(found)[0], key[None]), np.int32(seat))
    return Joined(
        Seats(
            put_shared(state, shared),
            keys,
            draws=_with(seats.draws, seat, rng is not None),
            taken=_with(seats.taken, seat, True),
            newcomer=newcomer,
        ),
        seat,
    )


def step(
    model: LanguageModel,
    seats: Seats,
    *,
    tokens: int = 1,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] = (),
    write: bool = True,
) -> Step:
    """The next tokens of all users who have not ended, each written into the user's own memory.

    Args:
      model: the language model.
      seats: before; cannot be used again.
      tokens: of each user, 1 to 256, before users can join or leave again. Another number compiles
        nothing.
      sampling: how tokens are chosen; None: the most likely token.
      stop_ids: tokens that end a user's answer. They are read too. The user keeps its seat.
      write: False leaves the memories unchanged.

    Returns:
      The new seats, and the tokens of each. A user whose log-probabilities are not finite, as of an
      overlay that lost rows, ends (`Step.failed`); the others go on, and their numbers are
      unchanged.

    Raises:
      ValueError: an argument does not fit, or a user may read more than full attention keeps;
        `seats` can still be used.
    """
    sampling = Sampling() if sampling is None else sampling
    if not 1 <= tokens <= NEW_AT_ONCE:
        raise ValueError(f"tokens={tokens} must lie between 1 and {NEW_AT_ONCE}.")
    check_stop_ids(stop_ids, model.config.vocab_size)
    _check_room(model, seats, tokens)
    silent = np.flatnonzero(seats.taken & ~seats.draws)
    if sampling.temperature > 0 and silent.size:
        raise ValueError(
            f"temperature={sampling.temperature} draws tokens, and the user in seat {silent[0]} "
            "joined without rng; let it leave, and join with one, as jax.random.key(0)."
        )
    memory = seats.state.stream.memory
    aside = Aside.of(memory, written=write)
    state, block = decode(
        *nnx.split(model),
        with_memory(seats.state, aside.carried(memory)),
        seats.keys,
        np.int32(tokens),
        sampling=sampling,
        stop_ids=tuple(int(token) for token in stop_ids),
        ragged=True,
        write=write,
        chunk_size=None,
        aside=aside,
    )
    memory = aside.whole(state.stream.memory)
    return Step(
        seats._replace(state=with_memory(state, memory)),
        tokens=np.asarray(block.tokens)[:, :tokens],
        log_probs=np.asarray(block.log_probs)[:, :tokens],
        waiting=~np.asarray(state.finished),
    )


def leave(seats: Seats, seat: int) -> Left:
    """Frees a seat; all others go on as they were.

    Args:
      seats: before; cannot be used again once the new ones are.
      seat: of the user.

    Returns:
      The seats, and the user's state, which `join`, `generate` and `memories.save` take. Its memory
      lies over the base of the seats.

    Raises:
      ValueError: this seat is empty.
    """
    if not 0 <= seat < len(seats.taken) or not seats.taken[seat]:
        taken = np.flatnonzero(seats.taken).tolist()
        raise ValueError(f"seat={seat} is not taken; these are: {taken}.")
    own, shared = take_shared(seats.state)
    user, finished = _stand_up(own, np.int32(seat))
    state = seats.state._replace(finished=finished)
    seats = seats._replace(state=state, taken=_with(seats.taken, seat, False))
    return Left(seats, put_shared(user, shared))


def _with(flags: np.ndarray, seat: int, flag: bool) -> np.ndarray:
    """The flags with another one for this seat."""
    flags = flags.copy()
    flags[seat] = flag
    return flags


@partial(jax.jit, donate_argnums=0)
def _sit_down(seats: Any, user: Any, seat: jax.Array) -> Any:
    """The leaves `[seats, ...]` with those of a user `[1, ...]` in this seat."""
    return jax.tree.map(
        lambda x, own: jax.lax.dynamic_update_slice_in_dim(x, own, seat, axis=0), seats, user
    )


@jax.jit
def _stand_up(state: Any, seat: jax.Array) -> tuple[Any, jax.Array]:
    """The user's leaves `[1, ...]`, and who has finished after it has left."""
    user = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, seat, 1, axis=0), state)
    return user, state.finished.at[seat].set(True)


def _fitting(
    model: LanguageModel, user: GenerationState, newcomer: GenerationState
) -> GenerationState:
    """The user's state with a memory and caches like those of the seats.

    Raises:
      ValueError: it cannot have them.
    """
    if len(user.finished) != 1:
        raise ValueError(f"user holds {len(user.finished)} sequences; a seat takes one.")
    memory, like = user.stream.memory, newcomer.stream.memory
    if shares(like):
        capacity = next(iter(overlay_use(like).values())).capacity
        if shares(memory):
            check_bases([memory, like])
            refuse_lost(memory)
            if any(use.capacity != capacity for use in overlay_use(memory).values()):
                memory = with_capacity(memory, capacity)
        else:
            memory = to_overlay(model, memory, like, capacity=capacity)
    room = attention_room(model, newcomer)
    user = with_memory(user, memory)
    user = user if room is None else grow(model, user, max_length=room)
    (own, _), (expected, base) = take_shared(user), take_shared(newcomer)
    found, wanted = (jax.tree_util.tree_flatten_with_path(x)[0] for x in (own, expected))
    for (path, x), (other, like) in zip(found, wanted, strict=False):
        if path != other or (x.shape, x.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"user has {jax.tree_util.keystr(path)} of {x.dtype}{list(x.shape)}, and a seat "
                f"{jax.tree_util.keystr(other)} of {like.dtype}{list(like.shape)}; start both with "
                "the same model, max_length and max_chunk_size."
            )
    if jax.tree.structure(own) != jax.tree.structure(expected):
        raise ValueError("user was made by another model or way of reading than these seats.")
    return put_shared(own, base)


def _check_room(model: LanguageModel, seats: Seats, tokens: int) -> None:
    """Raises a ValueError if full attention does not keep all that a user may read."""
    room = attention_room(model, seats.state)
    if room is None:
        return
    read = np.where(seats.taken & ~np.asarray(seats.state.finished), seats.state.num_read, 0)
    if read.max() + tokens > room:
        raise ValueError(
            f"Full attention keeps max_length={room} tokens, and the user in seat {read.argmax()} "
            f"may reach {read.max() + tokens}; let it leave, or open seats with more."
        )
