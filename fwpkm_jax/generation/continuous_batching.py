"""Users who decode side by side, each with a memory of its own, and come and go between steps.

Continuous batching: users take and leave batch slots, the rows of the batch. Every row is computed
apart from the others, by one compiled program, whatever is beside it: a user's tokens, logits and
memory are the same bit for bit in any batch slot, at any time, alone or in company. A user who
joins has read its prompt alone. Joining, leaving and decoding compile once for all users.
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
from fwpkm_jax.core.chunks import Memory, map_unshared, put_shared, shares, take_shared
from fwpkm_jax.generation.generate import (
    NEW_AT_ONCE,
    Reading,
    ReadOnly,
    decode,
    generate,
    with_memory,
)
from fwpkm_jax.generation.prompts import attention_room
from fwpkm_jax.generation.sampling import Sampling, check_stop_ids
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


class ContinuousBatch(NamedTuple):
    """Users who decode side by side.

    Attributes:
      state: of all batch slots, each a sequence with a memory of its own. What it holds of an
        empty one has no meaning.
      keys: of each user's draws.
      draws: whether the user has a key; on the host.
      taken: whether a user has it; on the host.
      start: the state of one user who has read nothing yet.
    """

    state: GenerationState
    keys: Key[Array, " slots"]
    draws: Bool[np.ndarray, " slots"]
    taken: Bool[np.ndarray, " slots"]
    start: GenerationState


class Joined(NamedTuple):
    """The batch after a user joined, and the user's batch slot."""

    batch: ContinuousBatch
    batch_slot: int


class Left(NamedTuple):
    """The batch after a user left, and the user's state, `batch` 1."""

    batch: ContinuousBatch
    user: GenerationState


class Step(NamedTuple):
    """The result of `step`.

    Attributes:
      batch: after these tokens.
      tokens: token ids `[slots, tokens]`; -1 in empty slots and after a user's stop token.
      log_probs: of each token in nats, as in `GenerationOutput`; 0 where `tokens` is -1, NaN where
        a user failed.
      waiting: whether a user can go on, `[slots]`; False in empty slots, after a stop token and
        after a failure.
    """

    batch: ContinuousBatch
    tokens: Int[np.ndarray, "slots tokens"]
    log_probs: Float[np.ndarray, "slots tokens"]
    waiting: Bool[np.ndarray, " slots"]

    @property
    def failed(self) -> Bool[np.ndarray, " slots"]:
        """Whether each user ended because its log-probabilities were not finite, `[slots]`."""
        return np.any(np.isnan(self.log_probs), axis=1)


def open_batch(
    model: LanguageModel,
    base: dict[str, Memory],
    *,
    batch_slots: int,
    capacity: int | None,
    max_length: int,
    max_chunk_size: int | None = None,
) -> ContinuousBatch:
    """A batch of empty batch slots.

    Args:
      model: the language model, on one device.
      base: the memory that every user begins with, leaves `[1, ...]`, as
        `LanguageModel.init_memory` makes or a run holds it.
      batch_slots: most users at a time, at least 2: products of a single row are computed in
        another order, so that one slot would give other last bits than many.
      capacity: slots of each layer that a user can write, kept beside the base, which is there once
        (`fwpkm_jax.overlays`). None: a whole memory in each batch slot, which every rule can have.
      max_length: most tokens, prompts and answers together, that full attention keeps of a user.
      max_chunk_size: as in `init_generation`.

    Raises:
      ValueError: there are fewer than 2 batch slots, or the rule has no overlay.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from fwpkm_jax import FastWeightConfig, FwPKM, LanguageModel, ModelConfig
      >>> from fwpkm_jax.generation import join, leave, open_batch, step
      >>> rule = FwPKM(num_subkeys=8, key_dim=8, value_dim=8, top_k=2)
      >>> config = ModelConfig(
      ...     vocab_size=32, model_dim=8, mlp_dim=8, mixers=("retnet",), memory_layers=(0,),
      ...     fast_weight=FastWeightConfig(rule=rule, chunk_size=4),
      ... )
      >>> model = LanguageModel(config, rngs=nnx.Rngs(0))
      >>> base = model.init_memory(jax.random.key(1))
      >>> batch = open_batch(model, base, batch_slots=4, capacity=32, max_length=100)
      >>> batch, alice = join(model, batch, [1, 2, 3])
      >>> batch, tokens, *_ = step(model, batch, tokens=2)
      >>> tokens.shape, (tokens[alice] >= 0).all().item()
      ((4, 2), True)
      >>> batch, user = leave(batch, alice)  # The next call of `join` takes the user back.
      >>> user.num_read.tolist()
      [5]
    """
    if batch_slots < 2:
        raise ValueError(f"batch_slots={batch_slots} must be at least 2; with one, call generate.")
    if any(x.shape[0] != 1 for x in jax.tree.leaves(base)):
        raise ValueError(
            "base holds several memories; give one, as overlays.take_users(base, [0])."
        )
    if capacity is not None:
        base = fork_memory(model, base, users=1, capacity=capacity)
    start = init_generation(
        model, base, batch=1, max_length=max_length, max_chunk_size=max_chunk_size
    )
    state = map_unshared(lambda x: jnp.repeat(x, batch_slots, axis=0), start)
    return ContinuousBatch(
        state=state._replace(finished=jnp.ones_like(state.finished)),
        keys=jax.random.split(jax.random.key(0), batch_slots),
        draws=np.zeros((batch_slots,), bool),
        taken=np.zeros((batch_slots,), bool),
        start=start,
    )


def join(
    model: LanguageModel,
    batch: ContinuousBatch,
    prompt: Sequence[int] | np.ndarray | None,
    *,
    user: GenerationState | None = None,
    rng: jax.Array | None = None,
    piece_length: int = 512,
) -> Joined:
    """Gives a user the first empty batch slot; all others go on as they were.

    Args:
      batch: before; cannot be used again.
      prompt: token ids, which the user reads alone beforehand (prefill); None: the user goes on
        behind what it has read, also behind a stop token.
      user: state of one sequence, from `leave`, `generate` or `memories.load`; after a prompt it
        cannot be used again. Its memory lies over the base of this batch or is private. None: a
        new user with the base as its memory.
      rng: key of the user's draws, as in `generate`; required by `step` with a temperature.
      piece_length: as in `generate`.

    Raises:
      ValueError: all batch slots are taken, the state does not fit them, or there is neither a
        prompt nor a token read before.
    """
    empty = np.flatnonzero(~batch.taken)
    if not empty.size:
        raise ValueError(f"All {len(batch.taken)} batch slots are taken; let a user leave first.")
    if rng is not None:
        check_key(rng)
    start = batch.start
    found = start if user is None else _fitting(model, user, start)
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
    batch_slot = int(empty[0])
    state, shared = take_shared(batch.state)
    key = jax.random.key(0) if rng is None else jax.random.fold_in(rng, 0)  # As in `generate`.
    state, keys = _insert(
        (state, batch.keys), (take_shared(found)[0], key[None]), np.int32(batch_slot)
    )
    return Joined(
        ContinuousBatch(
            put_shared(state, shared),
            keys,
            draws=_with(batch.draws, batch_slot, rng is not None),
            taken=_with(batch.taken, batch_slot, True),
            start=start,
        ),
        batch_slot,
    )


def step(
    model: LanguageModel,
    batch: ContinuousBatch,
    *,
    tokens: int = 1,
    sampling: Sampling | None = None,
    write: bool = True,
) -> Step:
    """The next tokens of all users who have not ended, each written into the user's own memory.

    Args:
      model: the language model.
      batch: before; cannot be used again.
      tokens: of each user, 1 to 256, before users can join or leave again. Another number compiles
        nothing.
      sampling: how tokens are chosen and which ones end a user's answer, who keeps the batch slot;
        None: the most likely token, and no end.
      write: False leaves the memories unchanged.

    Returns:
      The new batch, and the tokens of each user. A user whose log-probabilities are not finite,
      as of an overlay that lost rows, ends (`Step.failed`); the others go on, and their numbers
      are unchanged.

    Raises:
      ValueError: an argument does not fit, or a user may read more than full attention keeps;
        `batch` can still be used.
    """
    sampling = Sampling() if sampling is None else sampling
    if not 1 <= tokens <= NEW_AT_ONCE:
        raise ValueError(f"tokens={tokens} must lie between 1 and {NEW_AT_ONCE}.")
    check_stop_ids(sampling, model.config.vocab_size)
    _check_room(model, batch, tokens)
    silent = np.flatnonzero(batch.taken & ~batch.draws)
    if sampling.temperature > 0 and silent.size:
        raise ValueError(
            f"temperature={sampling.temperature} draws tokens, and the user in batch slot "
            f"{silent[0]} joined without rng; let it leave, and join with one, as "
            "jax.random.key(0)."
        )
    memory = batch.state.stream.memory
    read_only = ReadOnly.of(memory, written=write)
    state, block = decode(
        *nnx.split(model),
        with_memory(batch.state, read_only.carried(memory)),
        batch.keys,
        np.int32(tokens),
        sampling=sampling,
        ragged=True,
        reading=Reading(write),
        read_only=read_only,
    )
    memory = read_only.whole(state.stream.memory)
    return Step(
        batch._replace(state=with_memory(state, memory)),
        tokens=np.asarray(block.tokens)[:, :tokens],
        log_probs=np.asarray(block.log_probs)[:, :tokens],
        waiting=~np.asarray(state.finished),
    )


def leave(batch: ContinuousBatch, batch_slot: int) -> Left:
    """Frees a batch slot; all others go on as they were.

    Args:
      batch: before; cannot be used again once the new ones are.
      batch_slot: of the user.

    Returns:
      The batch, and the user's state, which `join`, `generate` and `memories.save` take. Its memory
      lies over the base of the batch.

    Raises:
      ValueError: this batch slot is empty.
    """
    if not 0 <= batch_slot < len(batch.taken) or not batch.taken[batch_slot]:
        taken = np.flatnonzero(batch.taken).tolist()
        raise ValueError(f"batch_slot={batch_slot} is not taken; these are: {taken}.")
    own, shared = take_shared(batch.state)
    user, finished = _extract(own, np.int32(batch_slot))
    state = batch.state._replace(finished=finished)
    batch = batch._replace(state=state, taken=_with(batch.taken, batch_slot, False))
    return Left(batch, put_shared(user, shared))


def _with(flags: np.ndarray, batch_slot: int, flag: bool) -> np.ndarray:
    """The flags with another one for this batch slot."""
    flags = flags.copy()
    flags[batch_slot] = flag
    return flags


@partial(jax.jit, donate_argnums=0)
def _insert(batch: Any, user: Any, batch_slot: jax.Array) -> Any:
    """The leaves `[slots, ...]` with those of a user `[1, ...]` in this batch slot."""
    return jax.tree.map(
        lambda x, own: jax.lax.dynamic_update_slice_in_dim(x, own, batch_slot, axis=0), batch, user
    )


@jax.jit
def _extract(state: Any, batch_slot: jax.Array) -> tuple[Any, jax.Array]:
    """The user's leaves `[1, ...]`, and who has finished after it has left."""
    user = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, batch_slot, 1, axis=0), state)
    return user, state.finished.at[batch_slot].set(True)


def _fitting(
    model: LanguageModel, user: GenerationState, start: GenerationState
) -> GenerationState:
    """The user's state with a memory and caches like those of the batch.

    Raises:
      ValueError: it cannot have them.
    """
    if len(user.finished) != 1:
        raise ValueError(f"user holds {len(user.finished)} sequences; a batch slot takes one.")
    memory, like = user.stream.memory, start.stream.memory
    if shares(like):
        capacity = next(iter(overlay_use(like).values())).capacity
        if shares(memory):
            check_bases([memory, like])
            refuse_lost(memory)
            if any(use.capacity != capacity for use in overlay_use(memory).values()):
                memory = with_capacity(memory, capacity)
        else:
            memory = to_overlay(model, memory, like, capacity=capacity)
    room = attention_room(model, start)
    user = with_memory(user, memory)
    user = user if room is None else grow(model, user, max_length=room)
    (own, _), (expected, base) = take_shared(user), take_shared(start)
    found, wanted = (jax.tree_util.tree_flatten_with_path(x)[0] for x in (own, expected))
    for (path, x), (other, like) in zip(found, wanted, strict=False):
        if path != other or (x.shape, x.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"user has {jax.tree_util.keystr(path)} of {x.dtype}{list(x.shape)}, and a batch "
                f"slot {jax.tree_util.keystr(other)} of {like.dtype}{list(like.shape)}; start both "
                "with the same model, max_length and max_chunk_size."
            )
    if jax.tree.structure(own) != jax.tree.structure(expected):
        raise ValueError("user was made by another model or way of reading than this batch.")
    return put_shared(own, base)


def _check_room(model: LanguageModel, batch: ContinuousBatch, tokens: int) -> None:
    """Raises a ValueError if full attention does not keep all that a user may read."""
    room = attention_room(model, batch.state)
    if room is None:
        return
    read = np.where(batch.taken & ~np.asarray(batch.state.finished), batch.state.num_read, 0)
    if read.max() + tokens > room:
        raise ValueError(
            f"Full attention keeps max_length={room} tokens, and the user in batch slot "
            f"{read.argmax()} may reach {read.max() + tokens}; let it leave, or open a batch "
            "with more."
        )
