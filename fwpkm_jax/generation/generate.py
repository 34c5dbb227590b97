"""Prefill and decoding; the model's memory and caches are an explicit state."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.core.checks import check_key
from fwpkm_jax.core.chunks import Memory, Shared, put_shared, take_shared
from fwpkm_jax.core.streams.pending import ChunkSize
from fwpkm_jax.generation.prompts import check_lengths, check_prompts, check_room, split_prompts
from fwpkm_jax.generation.sampling import Sampling, check_stop_ids, choose_tokens
from fwpkm_jax.generation.state import GenerationOutput, GenerationState
from fwpkm_jax.models.language_model import LanguageModel, Stream
from fwpkm_jax.models.outputs import StreamOutput
from fwpkm_jax.overlays import refuse_lost

_NO_TOKEN = -1
NEW_AT_ONCE = 256
"""New tokens of each sequence that one call of the device makes at most."""


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int] | np.ndarray] | np.ndarray | None,
    state: GenerationState,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    rng: jax.Array | None = None,
    write: bool = True,
    chunk_size: ChunkSize | None = None,
    piece_length: int = 512,
    keep_state: bool = False,
) -> GenerationOutput:
    """Tokens that follow the prompts, generated one by one on the device.

    Generation can be split over calls without changing its result: the state holds the next token's
    logits and the number of each sequence's draws. Lengths of prompts and answers are data: other
    ones compile nothing, once a prompt of each of the few padded sizes has been read. Prompts are
    padded in front. The padding changes no result of a sequence whose memory is its own or is not
    written. Sequences that share a written memory are aligned at the ends of their prompts.

    A sequence whose log-probabilities are not finite ends (`GenerationOutput.failed`); those of
    other memories go on, and their numbers are unchanged.

    Args:
      model: the language model.
      prompts: token ids of each sequence, `batch` prompts of any lengths, or None to continue all
        sequences. A sequence with an empty prompt continues; if it was finished, it stays finished.
      state: from `init_generation` or the previous call; unless `keep_state` is True, its buffers
        are reused, so it cannot be used again.
      max_new_tokens: most tokens generated for each sequence; 0 only reads the prompts.
      sampling: how tokens are chosen and which ones end a sequence; None: the most likely token,
        and no end.
      rng: key of all draws, the same in every call of one conversation; required if
        `sampling.temperature` is above 0.
      write: False leaves the memories unchanged.
      chunk_size: tokens per write; None: the config's. "flush": tokens wait, see
        `LanguageModel.stream`, and the memories stay unchanged, as in drafts that may be thrown
        away.
      piece_length: tokens of a prompt read per call; limits the device memory needed and does not
        change results.
      keep_state: True leaves `state` as it is, so that it can be gone back to. Its caches are
        copied, its memories only if this call may write them, and of overlays
        (`fwpkm_jax.overlays`) only each user's rows. What is not copied both states share, and a
        later call without `keep_state` that writes it uses up both.

    Returns:
      Generated tokens, their number and log-probabilities, and the new state; see
      `GenerationOutput`.

    Raises:
      ValueError: the prompts do not fit the batch, the vocabulary, the attention's cache or, with
        `chunk_size="flush"`, the queues; a sequence has neither a prompt nor tokens read before; a
        stop id lies outside the vocabulary; `rng` is missing; or a memory is an overlay and has
        lost rows (`fwpkm_jax.overlays`).

    Example:
      >>> from flax import nnx
      >>> from fwpkm_jax import LanguageModel, ModelConfig, generate, init_generation
      >>> config = ModelConfig(vocab_size=32, model_dim=8, mlp_dim=8, mixers=("retnet",))
      >>> model = LanguageModel(config, rngs=nnx.Rngs(0))
      >>> state = init_generation(model, {}, batch=1, max_length=16)
      >>> output = generate(model, [[1, 2, 3]], state, max_new_tokens=4)
      >>> output.tokens.shape
      (1, 4)
    """
    sampling = Sampling() if sampling is None else sampling
    batch = state.finished.shape[0]
    vocab_size = model.config.vocab_size
    if max_new_tokens < 0 or piece_length < 1:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} and piece_length={piece_length} must be at least 0 "
            "and 1."
        )
    if sampling.temperature > 0 and rng is None:
        raise ValueError(
            f"temperature={sampling.temperature} draws tokens; give rng, as jax.random.key(0)."
        )
    if rng is not None:
        check_key(rng)
    check_stop_ids(sampling, vocab_size)
    rows = check_prompts(prompts, batch=batch, vocab_size=vocab_size)
    lengths = np.array([len(row) for row in rows])
    check_lengths(model, state, lengths, max_new_tokens)
    if chunk_size == "flush" and write:
        check_room(state, lengths, max_new_tokens)
    graphdef, params = nnx.split(model)
    read_only = ReadOnly.of(state.stream.memory, written=write and chunk_size != "flush")
    options: dict[str, Any] = {"reading": Reading(write, chunk_size), "read_only": read_only}
    state = with_memory(state, read_only.carried(state.stream.memory))
    if keep_state:
        state = jax.tree.map(jnp.copy, state)
    if lengths.max():
        for pieces in split_prompts(rows, piece_length=piece_length):
            state = _prefill(graphdef, params, state, *pieces, **options)
    # With batch 1 the loop ends when the sequence stops, so no step needs a mask.
    ragged = batch > 1 and (bool(sampling.stop_ids) or bool(np.any(state.finished)))
    rng = jax.random.key(0) if rng is None else rng  # The key is not used: greedy.
    blocks: list[Block] = []
    for start in range(0, max_new_tokens, NEW_AT_ONCE):
        state, block = decode(
            *(graphdef, params, state, rng),
            # Data of the program, so that another number compiles nothing.
            np.int32(min(NEW_AT_ONCE, max_new_tokens - start)),
            sampling=sampling,
            ragged=ragged,
            **options,
        )
        blocks.append(block)
        if start + NEW_AT_ONCE < max_new_tokens and bool(np.all(state.finished)):
            break
    memory = read_only.whole(state.stream.memory)
    refuse_lost(memory)
    tokens, log_probs = _joined(blocks, batch, max_new_tokens, state.logits.dtype)
    return GenerationOutput(
        tokens=jax.device_put(tokens),
        lengths=jax.device_put(np.sum(tokens != _NO_TOKEN, axis=1, dtype=np.int32)),
        log_probs=jax.device_put(log_probs),
        state=with_memory(state, memory),
    )


class Block(NamedTuple):
    """New tokens of one call of `decode`, `[batch, NEW_AT_ONCE]`; the first `limit` count."""

    tokens: jax.Array
    log_probs: jax.Array


def _joined(
    blocks: Sequence[Block], batch: int, length: int, dtype: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities `[batch, length]`, cut on the host, which compiles nothing."""
    tokens = np.full((batch, length), _NO_TOKEN, np.int32)
    log_probs = np.zeros((batch, length), dtype)
    for number, block in enumerate(blocks):
        own = slice(number * NEW_AT_ONCE, (number + 1) * NEW_AT_ONCE)
        width = tokens[:, own].shape[1]
        tokens[:, own] = np.asarray(block.tokens)[:, :width]
        log_probs[:, own] = np.asarray(block.log_probs)[:, :width]
    return tokens, log_probs


class Reading(NamedTuple):
    """How a call reads tokens and writes memories, see `LanguageModel.stream`."""

    write: bool = True
    chunk_size: ChunkSize | None = None


class ReadOnly(NamedTuple):
    """Parts of the memories that a call does not write: its loops do not carry or copy them.

    Attributes:
      memory: all of the memories; None if the call may write them.
      shared: what groups share of memories that are written, the bases of overlays.
    """

    memory: dict[str, Memory] | None = None
    shared: Sequence[Shared] = ()

    @classmethod
    def of(cls, memory: dict[str, Memory], *, written: bool) -> "ReadOnly":
        """What a call of these memories does not write."""
        return cls(None, tuple(take_shared(memory)[1])) if written else cls(memory)

    def carried(self, memory: dict[str, Memory]) -> dict[str, Memory]:
        """The rest of the memories."""
        return take_shared(memory)[0] if self.memory is None else {}

    def whole(self, carried: dict[str, Memory]) -> dict[str, Memory]:
        """The memories, of which `carried` is the rest."""
        return put_shared(carried, self.shared) if self.memory is None else self.memory


_NOTHING = ReadOnly()


def with_memory(state: GenerationState, memory: dict[str, Memory]) -> GenerationState:
    """The state with other memories."""
    return state._replace(stream=state.stream._replace(memory=memory))


def _read(
    model: LanguageModel,
    tokens: jax.Array,
    stream: Stream,
    mask: jax.Array | None,
    reading: Reading,
    read_only: ReadOnly,
) -> StreamOutput:
    """`LanguageModel.stream` with the memories that `read_only` and the stream hold together."""
    stream = stream._replace(memory=read_only.whole(stream.memory))
    # A prompt's other tokens need no logits; prompts end with the last one of a piece.
    out = model.stream(tokens, stream, mask=mask, logits_to_keep=1, **reading._asdict())
    return out._replace(stream=out.stream._replace(memory=read_only.carried(out.stream.memory)))


@partial(jax.jit, static_argnames=("graphdef", "reading"), donate_argnames="state")
def _prefill(
    graphdef: Any,
    params: Any,
    state: GenerationState,
    tokens: jax.Array,
    mask: jax.Array | None,
    count: jax.Array,
    *,
    reading: Reading,
    read_only: ReadOnly = _NOTHING,
) -> GenerationState:
    """The state after the first `count` of the pieces `[pieces, batch, piece]`."""
    model = nnx.merge(graphdef, params)

    def read(index: jax.Array, carry: tuple[Stream, jax.Array]) -> tuple[Stream, jax.Array]:
        of_piece = None if mask is None else mask[index]
        out = _read(model, tokens[index], carry[0], of_piece, reading, read_only)
        # Prompts end with the last piece, so its last position is real in every prompt.
        return out.stream, out.logits[:, 0]

    stream, logits = jax.lax.fori_loop(0, count, read, (state.stream, state.logits))
    if mask is None:
        num_new = jnp.full_like(state.num_read, tokens.shape[2]) * count
    else:  # The pieces behind `count` are all padding.
        num_new = jnp.sum(mask, axis=(0, 2)).astype(state.num_read.dtype)
    has_prompt = num_new > 0
    return GenerationState(
        stream=stream,
        logits=jnp.where(has_prompt[:, None], logits, state.logits),
        finished=state.finished & ~has_prompt,
        num_read=state.num_read + num_new,
        num_drawn=state.num_drawn,
    )


@partial(
    jax.jit,
    static_argnames=("graphdef", "sampling", "ragged", "reading"),
    donate_argnames="state",
)
def decode(
    graphdef: Any,
    params: Any,
    state: GenerationState,
    rng: jax.Array,
    limit: jax.Array,
    *,
    sampling: Sampling,
    ragged: bool,
    reading: Reading,
    read_only: ReadOnly = _NOTHING,
) -> tuple[GenerationState, Block]:
    """The state after at most `limit` new tokens of each sequence, and these tokens.

    Args:
      rng: key of all draws, or keys `[batch]`, one of each sequence.
      ragged: whether sequences may be finished while others go on.
      reading: how the new tokens are read.
    """
    model = nnx.merge(graphdef, params)
    batch = state.finished.shape[0]
    keys = rng
    if not (jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) and rng.ndim):
        # One key per sequence, so that its draws do not depend on the other sequences.
        keys = jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(batch))
    stops = jnp.asarray(sampling.stop_ids, jnp.int32)

    def unfinished(carry: tuple[jax.Array, GenerationState, Block]) -> jax.Array:
        step, state, _ = carry
        return (step < limit) & ~jnp.all(state.finished)

    def extend(carry: tuple[jax.Array, GenerationState, Block]):
        step, state, (tokens, log_probs) = carry
        active = ~state.finished
        draws = jax.vmap(jax.random.fold_in)(keys, state.num_drawn)
        chosen = choose_tokens(state.logits, draws, sampling)
        score = jnp.take_along_axis(
            jax.nn.log_softmax(state.logits, axis=-1), chosen[:, None], axis=-1
        )[:, 0]
        mask = active[:, None].astype(jnp.float32) if ragged else None
        read = _read(model, chosen[:, None], state.stream, mask, reading, read_only)
        # Of logits that are not finite a token would be chosen, too, the same one for ever.
        failed = active & ~jnp.isfinite(score)
        active &= ~failed
        score = jnp.where(failed, jnp.nan, jnp.where(active, score, 0))
        count = active.astype(jnp.int32)
        state = GenerationState(
            stream=read.stream,
            logits=jnp.where(active[:, None], read.logits[:, 0], state.logits),
            finished=state.finished | jnp.isin(chosen, stops) | failed,
            num_read=state.num_read + count,
            num_drawn=state.num_drawn + count,
        )
        block = Block(
            tokens=tokens.at[:, step].set(jnp.where(active, chosen, _NO_TOKEN)),
            log_probs=log_probs.at[:, step].set(score),
        )
        return step + 1, state, block

    block = Block(
        tokens=jnp.full((batch, NEW_AT_ONCE), _NO_TOKEN, jnp.int32),
        log_probs=jnp.zeros((batch, NEW_AT_ONCE), state.logits.dtype),
    )
    carry = (jnp.zeros((), jnp.int32), state, block)
    return jax.lax.while_loop(unfinished, extend, carry)[1:]
