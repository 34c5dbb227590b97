"""Checks prompts of different lengths and pads them to one shape."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fwpkm_jax.generation.state import GenerationState
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.models.outputs import layer_name

SHORT_PIECES = (16, 64, 256)
"""Tokens of a prompt's first piece, where that is shorter than the others."""
PIECES_AT_ONCE = 8
"""Whole pieces that one call of the device reads."""


def check_prompts(prompts: Any, *, batch: int, vocab_size: int) -> list[np.ndarray]:
    """The prompts as int32 arrays `[length]`, one per sequence; empty arrays for None.

    Raises:
      ValueError: there is not one prompt per sequence, or a prompt is not a sequence of token ids
        below `vocab_size`.
    """
    rows = [np.asarray(row) for row in ([()] * batch if prompts is None else prompts)]
    if len(rows) != batch:
        raise ValueError(f"{len(rows)} prompts for a state of {batch} sequences; give one each.")
    for number, row in enumerate(rows):
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise ValueError(
                f"prompts[{number}] has shape {row.shape} and dtype {row.dtype}; each prompt is a "
                "sequence of token ids."
            )
        if row.size and not 0 <= row.min() <= row.max() < vocab_size:
            wrong = row[(row < 0) | (row >= vocab_size)][0]
            raise ValueError(f"prompts[{number}] holds {wrong}, not one of {vocab_size} ids.")
    return [row.astype(np.int32) for row in rows]


def check_lengths(
    model: LanguageModel, state: GenerationState, lengths: np.ndarray, max_new_tokens: int
) -> None:
    """Checks that each sequence has a token to continue and fits into full attention's cache.

    Args:
      state: the state before the prompts are read.
      lengths: lengths of the prompts, `[batch]`.
      max_new_tokens: most tokens generated for each sequence.

    Raises:
      ValueError: a sequence has neither a prompt nor tokens read before, or may exceed the cache.
    """
    num_read = np.asarray(state.num_read)
    silent = np.flatnonzero((num_read == 0) & (lengths == 0))
    if silent.size and max_new_tokens:
        raise ValueError(
            f"Sequence {silent[0]} has no token to continue from; give it a prompt of at least one "
            "token."
        )
    longest = int(np.max(num_read + lengths)) + max_new_tokens
    kept = attention_room(model, state)
    if kept is not None and longest > kept:
        raise ValueError(
            f"Full attention keeps max_length={kept} tokens, and a sequence may reach "
            f"{longest}; start with init_generation(..., max_length={longest}) or more."
        )


def attention_room(model: LanguageModel, state: GenerationState) -> int | None:
    """Tokens that full attention keeps of a sequence; None if no layer has a limit."""
    kept = [
        block.mixer.capacity(state.stream.layers[layer_name(index)].cache)
        for index, block in enumerate(model.blocks)
    ]
    return min((room for room in kept if room is not None), default=None)


def check_room(state: GenerationState, lengths: np.ndarray, max_new_tokens: int) -> None:
    """Checks that all tokens of a call find room in the queues, where nothing is written.

    Args:
      state: the state before the prompts are read.
      lengths: lengths of the prompts, `[batch]`.
      max_new_tokens: most tokens generated for each sequence.

    Raises:
      ValueError: they may not.
    """
    new = int(lengths.max()) + max_new_tokens
    for name, layer in state.stream.layers.items():
        if layer.pending is None:
            continue
        waiting = int(np.max(np.asarray(layer.pending.num_waiting)))
        room = jax.tree.leaves(layer.pending.tokens)[0].shape[2] - waiting
        if new > room:
            raise ValueError(
                f"chunk_size='flush' writes nothing, and {name} has room for {room} more waiting "
                f"tokens, not {new}; start with init_generation(..., max_chunk_size="
                f"{waiting + new}) or more."
            )


class Pieces(NamedTuple):
    """Some pieces of the prompts, of which a call reads the first `number`.

    Attributes:
      tokens: int32 `[pieces, batch, piece]`.
      mask: float32, 0 at padding; None without padding in these pieces.
      number: pieces that hold tokens; those behind only make the shape the same in every call.
    """

    tokens: np.ndarray
    mask: np.ndarray | None
    number: int


def split_prompts(rows: Sequence[np.ndarray], *, piece_length: int) -> Iterator[Pieces]:
    """The prompts in pieces of few shapes, so that prompts of new lengths compile nothing.

    Padding stands in front, so prompts end with the last piece, whose last position is real in
    every prompt. The first piece is as long as the smallest of `SHORT_PIECES` that holds what is
    left over whole pieces. The others are `piece_length` tokens long and come `PIECES_AT_ONCE` at a
    time, the last of these filled up with pieces that are not read.
    """
    longest = max(len(row) for row in rows)
    first = longest % piece_length
    first = next((size for size in SHORT_PIECES if first <= size < piece_length), piece_length)
    first = first if longest % piece_length else 0
    whole = longest // piece_length
    padded = first + whole * piece_length
    tokens = np.zeros((len(rows), padded), np.int32)
    mask = np.zeros((len(rows), padded), np.float32)
    for number, row in enumerate(rows):
        tokens[number, padded - len(row) :] = row
        mask[number, padded - len(row) :] = 1
    if first:
        yield Pieces(tokens[None, :, :first], mask[None, :, :first], 1)

    def cut(x: np.ndarray) -> np.ndarray:
        x = x.reshape(len(rows), -1, piece_length).swapaxes(0, 1)
        return np.pad(x, ((0, PIECES_AT_ONCE - len(x)), (0, 0), (0, 0)))

    for start in range(0, whole, PIECES_AT_ONCE):
        count = min(PIECES_AT_ONCE, whole - start)
        own = slice(first + start * piece_length, first + (start + count) * piece_length)
        padding = None if mask[:, own].all() else cut(mask[:, own])
        yield Pieces(cut(tokens[:, own]), padding, count)
