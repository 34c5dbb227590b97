"""The ways in which a `LanguageModel` turns tokens into logits, as paths for the audit."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax import overlays
from fwpkm_jax.audit.design import ROUNDING, Path, boundaries
from fwpkm_jax.audit.program import MOST_CALLS, copied
from fwpkm_jax.core.chunks import map_unshared
from fwpkm_jax.evaluation.readers.devices import (
    memory_on_devices,
    model_on_devices,
    rows_on_devices,
)
from fwpkm_jax.generation import generate, init_generation
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.models.config import mixer_memory
from fwpkm_jax.models.language_model import LanguageModel, Memory, Stream

NEW = 4
"""Tokens that a user's answer has."""
_ROWS = 32  # Of a probe; fewer where more tokens or bytes than the next two are needed.
_MOST_TOKENS = 2**14
_MOST_BYTES = 2**29  # Of the memories, and of the logits, of all rows together.
_LEAST, _CHUNKS = 96, 4  # Tokens and chunks of a row, at least.


class Probe(NamedTuple):
    """Random texts that all checks of a model read, so that they share compilations.

    Attributes:
      tokens: `[rows, length]`, an even number of rows.
      changed: positions from which on texts are changed, see `causality`.
    """

    tokens: np.ndarray
    changed: list[int]


def probe(
    model: LanguageModel, memory: Memory, *, seed: int, row_length: int | None = None
) -> Probe:
    """The texts of a model.

    They are as long as the run's rows, hold several chunks, and end with a part of one.

    Args:
      model: the language model.
      memory: leaves `[1, ...]`.
      seed: of the texts.
      row_length: tokens of a row that the model was trained on; None: unknown.
    """
    sizes = chunk_sizes(model)
    length = max(row_length or 0, _CHUNKS * sizes[-1], _LEAST) + sizes[-1] // 2 + 3
    bytes_of_row = max(
        sum(leaf.nbytes for leaf in jax.tree.leaves(memory)), 4 * length * model.config.vocab_size
    )
    rows = max(2, min(_ROWS, _MOST_BYTES // bytes_of_row, _MOST_TOKENS // length) // 2 * 2)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(model.config.vocab_size, size=(rows, length)).astype(np.int32)
    return Probe(tokens, boundaries(length, sizes, most=MOST_CALLS * rows))


def chunk_sizes(model: LanguageModel) -> list[int]:
    """Tokens per write of the model's memories, those of mixers with a memory included."""
    own = mixer_memory(model.config)
    sizes = {own.chunk_size} if own is not None else set()
    if model.config.memory_layers:
        sizes.add(model.config.fast_weight.chunk_size)
    return sorted(sizes) or [16]  # Without a memory: any length.


def for_rows(memory: Memory, rows: int) -> Memory:
    """The first group's memory once for each of `rows` sequences."""
    return map_unshared(lambda x: jnp.broadcast_to(x[:1], (rows, *x.shape[1:])), memory)


@dataclass(frozen=True)
class ModelProgram:
    """A `LanguageModel` as a `Program` that reads streams; each row has a memory of its own."""

    model: LanguageModel
    initial: Memory
    """What each row starts from, leaves `[1, ...]`."""
    writes: bool = True
    """False: nothing is ever written."""

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def rounding(self) -> float:
        """See `causality`. bfloat16 has 8 bits, so sums in another order differ more."""
        return ROUNDING if self.model.config.activation_dtype == "float32" else 0.02

    @cached_property
    def split(self) -> tuple[Any, Any]:
        """The model's structure and its parameters."""
        return nnx.split(self.model)

    def start(self, rows: int, length: int) -> Stream:
        return self.model.init_stream(for_rows(self.initial, rows), batch=rows, max_length=length)

    def read(
        self, state: Stream, tokens: np.ndarray, *, write: bool, mask: np.ndarray | None = None
    ) -> tuple[np.ndarray, Stream]:
        """See `Program`; `mask` is 1 for real tokens, 0 for padding."""
        write = write and self.writes
        logits, state = _piece(*self.split, state, tokens, mask, write=write)
        return np.asarray(logits), state

    def memory(self, state: Stream) -> Memory:
        return state.memory

    def restart(self, state: Stream) -> Stream:
        return self.model.reset_caches(state, pending=True)


@partial(jax.jit, static_argnames=("graphdef", "write"))
def _piece(
    graphdef: Any,
    params: Any,
    stream: Stream,
    tokens: jax.Array,
    mask: jax.Array | None,
    *,
    write: bool,
) -> tuple[jax.Array, Stream]:
    out = nnx.merge(graphdef, params).stream(tokens, stream, mask=mask, write=write)
    return out.logits, out.stream


def whole_pass(
    model: LanguageModel,
    memory: Memory,
    *,
    write: bool = True,
    segment_ids: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    partition: Partition | None = None,
) -> Path:
    """Whole sequences from position 0, as in training.

    Args:
      model: the language model.
      memory: fast weights, leaves `[groups, ...]`; groups divides the rows.
      write: whether the memory is written.
      segment_ids: see `LanguageModel`.
      mask: see `LanguageModel`.
      partition: devices that share the work; None: one.
    """
    graphdef, params = nnx.split(model_on_devices(partition, model))
    memory = memory_on_devices(partition, memory)
    options = {"segment_ids": segment_ids, "mask": mask, "write": write, "partition": partition}
    return lambda tokens: np.asarray(_whole(graphdef, params, memory, tokens, **options))


@partial(jax.jit, static_argnames=("graphdef", "write", "partition"))
def _whole(
    graphdef: Any,
    params: Any,
    memory: Memory,
    tokens: jax.Array,
    *,
    segment_ids: jax.Array | None,
    mask: jax.Array | None,
    write: bool,
    partition: Partition | None,
) -> jax.Array:
    model = nnx.merge(graphdef, params)
    rows = rows_on_devices(partition, model, tokens, memory)
    options = {"mask": mask, **rows.options}
    out = model(rows.tokens, memory, write=write, segment_ids=segment_ids, **options)
    return out.logits[:, : tokens.shape[1]]


def generation(model: LanguageModel, memory: Memory) -> Path:
    """What users get from `generate`: logits behind a prompt, an answer, and a memory.

    A prompt is read in two calls, of which the second continues a state. Logits are those behind
    each of them, and zeros elsewhere.
    """

    def path(tokens: np.ndarray) -> dict[str, Any]:
        rows, length = tokens.shape
        state = init_generation(model, memory, batch=rows, max_length=length + NEW)
        logits = np.zeros((rows, length, model.config.vocab_size), np.float32)
        for part in (slice(0, length // 2), slice(length // 2, length)):
            state = generate(model, tokens[:, part], state, max_new_tokens=0).state
            logits[:, part.stop - 1] = np.asarray(state.logits)
        out = generate(model, None, state, max_new_tokens=NEW)
        users = overlays.to_private(out.state.stream.memory)
        answers = {"answer": out.tokens, "log_probs": out.log_probs, "memory": users}
        return {"logits": logits, **copied(answers)}

    return path
