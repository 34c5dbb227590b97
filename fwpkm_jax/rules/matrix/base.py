"""The interface of a matrix memory: its write and read for one token, and the loss of the write."""

import abc
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from fwpkm_jax.core.checks import check_arrays, check_tree
from fwpkm_jax.core.numerics import compute_dtype
from fwpkm_jax.core.recurrence.linear_recurrence import (
    RecurrenceOutput,
    chunk_recurrence,
    scan_tokens,
)
from fwpkm_jax.core.recurrence.transition import (
    Fading,
    Mixing,
    MixingValues,
    before_part,
    beside_identity,
    log_kept,
)
from fwpkm_jax.core.sequence.axis import SequenceAxis
from fwpkm_jax.core.sequence.sequential import sequential_pass
from fwpkm_jax.literals import Checked, Count
from fwpkm_jax.rules.matrix.features import FEATURE_MAPS, FeatureMap
from fwpkm_jax.rules.matrix.gates import GateInputs, LearnedGates
from pallas_kernels.recurrence import linear_recurrence

Starts = Bool[Array, "batch length"] | None
State = Any  # A matrix `[key, value]` per sequence and head, or a pytree around one.


TransitionForm = Literal["fades", "mixes_keys", "mixes_values", "other"]
"""What the tokens of a part of a sequence do to the memory before them: "fades": each key channel
keeps the share of the decays in `recurrence_inputs`; "mixes_keys": a matrix `[key, key]` acts on
it, the same for every value channel; "mixes_values": a matrix `[value, value]`, the same for every
key channel; "other": anything else, so that devices compute their parts of a sequence one after the
other."""


StrengthPart = Literal["head", "pair", "key", "value"]
"""What a part of a strength has a number for: the head, or each pair of key channels, each key
channel, each value channel of it."""
Strength = bool | Literal["key", "value"] | tuple[StrengthPart, ...]
"""A rule's write strength: none (False), one number per head and write (True), one per channel, or
several parts side by side in one axis."""


class Tokens(NamedTuple):
    """The inputs of each head and token, leaves `[batch, length, heads, ...]`.

    For one head and one token, as `write` takes it, without these three axes.

    Attributes:
      query: what to read with, `[key]`.
      key: where to write, `[key]`.
      value: what to write, `[value]`.
      log_decay: log of the share of the memory kept: `[]` or, where a rule's `decay` is "key",
        `[key]`; None for rules without.
      strength: its meaning is in the rule's docstring: `[]` or `[numbers]`, as the rule's
        `strength` says (`strength_axis`); None for rules without.

    A rule with several writes per token takes `key`, `value` and `strength` with a length `steps`
    times that of `query`; a token then has a leading axis `[steps]` in these.
    """

    query: Array
    key: Array
    value: Array
    log_decay: Array | None = None
    strength: Array | None = None


class LocalLoss(NamedTuple):
    """A loss of the memory's matrix `[key, value]`; one step of `step_size` on it is the write."""

    loss: Callable[[Array], Array]
    step_size: Any = 1.0


class Form(NamedTuple):
    """A rule as `W_t = L_t W_{t-1} R_t + C_t` in LaTeX, for the docs; W is `[value, key]`."""

    name: str
    right: str
    written: str
    loss: str
    source: str
    left: str = "$I$"
    read: str = "$Wq$"
    step_size: str = "$1$"


@dataclass(frozen=True, kw_only=True)
class AbstractMatrixRule(Checked, abc.ABC):
    """A memory of one matrix per sequence and head; each update is linear in the matrix.

    `write` and `read` define a rule, for one token of one head. `chunked` gives the same for whole
    sequences; a layer needs `features` and `gates` besides. All are pure.
    """

    registry: ClassVar[str] = "fwpkm_jax.rules.registry"
    """As in `AbstractRule`."""

    form: ClassVar[Form]
    """The rule as the documentation shows it."""
    decay: ClassVar[Literal["none", "head", "key"]] = "none"
    """Whether tokens have a decay: none, one number per head, or one per key channel."""
    strength: ClassVar[Strength] = False
    """Whether tokens have a write strength, and of how many numbers."""
    delta: ClassVar[bool] = False
    """Whether a write corrects the share `strength` of the error; off: writes add."""
    no_strength: ClassVar[float] = 0.0
    """The strength with which a write changes nothing."""
    learned_gates: ClassVar[LearnedGates] = LearnedGates()
    """What `gates` needs."""
    transition: ClassVar[TransitionForm | None] = None
    """How tokens change what the memory held before them, see `TransitionForm`. None: for a rule
    that keeps the `chunked` of this class, "mixes_keys" if `delta`, else "fades"; for others
    "other"."""

    sparse: ClassVar[bool] = False
    """Whether a token touches few of the memory's numbers in `chunked`, but `write` goes over all:
    a layer then decodes by `chunked`."""

    learned_start: ClassVar[bool] = False
    """Whether a layer learns the memory that sequences and documents start from: one array, which
    `chunked` takes as `fresh`."""
    value_map: ClassVar[FeatureMap] = "identity"
    """Map that a layer applies to values."""

    feature_map: FeatureMap = "identity"
    """Map that a layer applies to queries and keys."""
    convolution: bool = False
    """Whether a layer puts a short convolution and SiLU before queries, keys and values."""
    chunk_size: Count = 64
    """Writes per chunk of `chunked`; changes speed, and results only by rounding."""

    @classmethod
    def variants(cls) -> "tuple[AbstractMatrixRule, ...]":
        """Instances that together exercise every branch, for tests."""
        return (cls(),)

    @property
    def steps(self) -> int:
        """Writes per token."""
        return 1

    def init(self, batch: int, heads: int, key: int, value: int, *, dtype: DTypeLike) -> State:
        """Empty memories."""
        return jnp.zeros((batch, heads, key, value), dtype)

    @abc.abstractmethod
    def write(self, state: State, token: Tokens) -> State:
        """One head's memory after one token."""

    def read(self, state: State, token: Tokens) -> Float[Array, " value"]:
        """What one token reads, after its own write."""
        return self.read_out(token.query @ self.matrix(state))

    def read_out(self, product: Array) -> Array:
        """What a query reads, from its product with the matrix; by default the product."""
        return product

    @abc.abstractmethod
    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        """The losses whose gradient steps, one after the other, are `write`."""

    def chunked(self, tokens: Tokens, state: State, starts: Starts = None) -> RecurrenceOutput:
        """`recurrent`, `chunk_size` writes at a time, with the arguments that `run` has checked.

        By the shared recurrence, from what `recurrence_inputs` makes of the tokens.

        A rule whose own `chunked` has no argument `starts` refuses rows of several documents.
        """
        tokens = self.recurrence_inputs(tokens)
        out = linear_recurrence(
            tokens.query,
            tokens.key,
            tokens.value,
            log_decay=tokens.log_decay,
            beta=tokens.strength if self.delta else None,
            initial_state=state,
            starts=starts,
            chunk_size=self.chunk_size,
        )
        return out._replace(output=self.read_out(out.output))

    def recurrence(
        self, tokens: Tokens, state: State, starts: Starts, *, beta: Any = None, **how: Any
    ) -> RecurrenceOutput:
        """`chunk_recurrence` of these tokens, without their `strength`, and of a matrix a head."""
        return chunk_recurrence(
            *tokens[:3],
            log_decay=tokens.log_decay,
            beta=beta,
            initial_state=state,
            starts=starts,
            chunk_size=self.chunk_size,
            **how,
        )

    def recurrence_inputs(self, tokens: Tokens) -> Tokens:
        """What the shared recurrence takes in place of the tokens; by default the tokens.

        The recurrence decays the memory by `log_decay`. Then it adds `value` under `key`, or with
        `delta` corrects the share `strength` of the error. Works on the leaves that `chunked`
        takes, and on those that `write` takes.
        """
        return tokens

    def strengths(self, tokens: Tokens) -> list[Array]:
        """The parts of a strength that has several, each `[..., numbers]`."""
        widths = tokens.key.shape[-1], tokens.value.shape[-1]
        ends = np.cumsum(strength_parts(self.strength, *widths))
        return jnp.split(given(tokens.strength), ends[:-1], axis=-1)

    def matrix(self, state: State) -> Float[Array, "key value"]:
        """The matrix in one head's memory: all of it, or the field `matrix`."""
        return getattr(state, "matrix", state)

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        """`log_decay` and `strength` of the tokens from what a layer projected."""
        del inputs
        return None, None

    def features(self, query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values as the memory takes them, in at least float32."""
        feature_map = FEATURE_MAPS[self.feature_map]
        # As in softmax attention, so that reads do not grow with the width of the keys.
        scale = query.shape[-1] ** -0.5
        return feature_map(query) * scale, feature_map(key), FEATURE_MAPS[self.value_map](value)

    def skip(self, tokens: Tokens, real: Bool[Array, "batch length"]) -> Tokens:
        """The tokens, changed so that those where `real` is false do not change the memory."""

        def keep(x: Array | None, otherwise: float) -> Any:
            if x is None:
                return None
            # Several writes of a token are skipped together.
            mask = jnp.repeat(real, x.shape[1] // real.shape[1], axis=1)
            return jnp.where(jnp.expand_dims(mask, range(2, x.ndim)), x, otherwise)

        return Tokens(
            query=tokens.query,
            key=keep(tokens.key, 0.0),
            value=keep(tokens.value, 0.0),
            log_decay=keep(tokens.log_decay, 0.0),
            strength=keep(tokens.strength, self.no_strength),
        )

    def recurrent(
        self,
        tokens: Tokens,
        initial_state: State | None = None,
        starts: Starts = None,
        *,
        fresh: State | None = None,
    ) -> RecurrenceOutput:
        """What each token reads, computed token by token: the definition of the rule.

        Args:
          tokens: leaves `[batch, length, heads, ...]`.
          initial_state: from `init` or the last call; None: empty.
          starts: `[batch, length]`, true at the first token of each document, before which the
            memory is set to `fresh`. None: a sequence is one document.
          fresh: leaves `[heads, ...]`; None: what `init` returns.

        Returns:
          What each token read, `[batch, length, heads, value]`, and the memory after the last one.

        Raises:
          ValueError: a gate that the rule takes is missing or has the wrong rank, or the rule takes
            no such gate.
        """
        tokens, state = self._prepare(tokens, initial_state)
        if self.steps > 1:
            every = (tokens.key, tokens.value, tokens.strength)
            # `[batch, length * steps, heads, ...]` to `[batch, length, heads, steps, ...]`.
            key, value, strength = jax.tree.map(
                lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, self.steps, *x.shape[2:]), 2, 3),
                every,
            )
            tokens = tokens._replace(key=key, value=value, strength=strength)
        if starts is None:
            return scan_tokens(self.write, self.read, tokens, state)
        if fresh is None:
            heads, width = tokens.query.shape[2:]
            fresh = self.init(1, heads, width, tokens.value.shape[-1], dtype=tokens.query.dtype)
        fresh = jax.tree.map(
            lambda x, y: jnp.broadcast_to(x, y.shape).astype(y.dtype), fresh, state
        )

        def write(both: tuple[State, State], token: tuple[Tokens, Array]) -> tuple[State, State]:
            (state, fresh), (of_token, start) = both, token
            # The reset comes before the token's own write and read.
            state = jax.tree.map(lambda new, old: jnp.where(start, new, old), fresh, state)
            return self.write(state, of_token), fresh

        # Heads are memories of their own, which start anew together.
        at_heads = jnp.broadcast_to(starts[:, :, None], tokens.query.shape[:3])
        out = scan_tokens(
            write,
            lambda both, token: self.read(both[0], token[0]),
            (tokens, at_heads),
            (state, fresh),
        )
        return out._replace(final_state=out.final_state[0])

    def run(
        self,
        tokens: Tokens,
        initial_state: State | None = None,
        starts: Starts = None,
        *,
        fresh: State | None = None,
    ) -> RecurrenceOutput:
        """The result of `recurrent`, computed in chunks: fast for whole sequences, differentiable.

        Raises:
          ValueError: as `recurrent`; or `starts` for a rule whose `chunked` does not take it.
        """
        tokens, state = self._prepare(tokens, initial_state)
        if starts is None:
            return self.chunked(tokens, state)
        # A rule of another package may have a chunked form without documents.
        if "starts" not in inspect.signature(self.chunked).parameters:
            raise ValueError(
                f"{type(self).__name__} takes no documents (starts, segment_ids): its chunked has "
                "no argument starts; put one document into each row, or choose another rule."
            )
        if fresh is None:
            return self.chunked(tokens, state, starts)
        return self.chunked(tokens, state, starts, fresh=fresh)  # pyright: ignore[reportCallIssue]

    def run_part(
        self,
        tokens: Tokens,
        initial_state: State | None = None,
        starts: Starts = None,
        *,
        axis: SequenceAxis,
        fresh: State | None = None,
    ) -> RecurrenceOutput:
        """`run` of a sequence of which each device has a part, inside `jax.shard_map`.

        What devices send does not grow with the length: the parts' transitions, or, for a rule
        that has no `part`, the memory from device to device in turn.

        Args:
          tokens: of this device's part.
          initial_state: before the whole sequence, equal on all devices; None: empty.
          starts: of this device's part, true at the first token of each document.
          axis: over which the sequence lies.
          fresh: as in `recurrent`.

        Returns:
          What this device's tokens read, and on every device the memory after the last part.
        """
        tokens, start = self._prepare(tokens, initial_state)
        # Two passes over the tokens: what they do to any memory, and what they read once the memory
        # before them is known.
        part = self.part(tokens, starts)
        if part is not None:
            start = before_part(part, start, axis=axis)
        else:

            def step(state: State, inputs: tuple[Tokens, Starts]) -> State:
                return self.run(inputs[0], state, inputs[1], fresh=fresh).final_state

            start = sequential_pass(step, start, (tokens, starts), axis=axis)
        output, end = self.run(tokens, start, starts, fresh=fresh)
        return RecurrenceOutput(output, axis.from_last(end))

    def part(self, tokens: Tokens, starts: Starts = None) -> Any:
        """What these tokens do to any memory, a `core.recurrence.transition.Transition`.

        By default as `transition` says; None for "other". A rule with a state of its own kind may
        return a transition of its own.

        Args:
          tokens: as `chunked` takes them.
          starts: first tokens of documents.
        """
        batch, _, heads, width = tokens.key.shape
        values, dtype = tokens.value.shape[-1], tokens.key.dtype
        form = self.transition
        if form is None:
            is_base = type(self).chunked is AbstractMatrixRule.chunked
            form = ("mixes_keys" if self.delta else "fades") if is_base else "other"
        if form == "other":
            return None
        # The transition is what the tokens make of the identity, beside what they make of nothing.
        if form == "mixes_keys":
            start, value = beside_identity(tokens.value, width)
            end = self.run(tokens._replace(value=value), start, starts).final_state
            return Mixing(end[..., :width], end[..., width:])
        # A memory that only fades is the share that is kept of it, plus what the same tokens make
        # of an empty one.
        empty = self.init(batch, heads, width, values, dtype=dtype)
        end = self.run(tokens, empty, starts).final_state
        if form == "fades":
            log_decay = self.recurrence_inputs(tokens).log_decay
            return Fading(log_kept(log_decay, starts, like=tokens.key), end)
        identity = jnp.broadcast_to(jnp.eye(values, dtype=dtype), (batch, heads, values, values))
        # Without keys only the left factors act: what they make of the identity is their product.
        nothing = jnp.zeros((*tokens.key.shape[:3], values), dtype)
        unwritten = tokens._replace(query=nothing, key=nothing)
        return MixingValues(self.run(unwritten, identity, starts).final_state, end)

    def _prepare(self, tokens: Tokens, state: State | None) -> tuple[Tokens, State]:
        """Checked tokens in one dtype, at least float32, and a memory."""
        check_arrays(
            query=(tokens.query, "float batch length heads key"),
            key=(tokens.key, "float batch writes heads key"),
            value=(tokens.value, "float batch writes heads value"),
        )
        batch, length, heads, width = tokens.query.shape
        # Rank 0 stands for None: a gate that the rule does not take would have no effect.
        ranks = {"log_decay": {"none": 0, "head": 3, "key": 4}[self.decay]}
        numbers = strength_axis(self.strength, width, tokens.value.shape[-1])
        ranks["strength"] = 3 + len(numbers) if self.strength else 0
        for name, rank in ranks.items():
            given = getattr(tokens, name)
            wide = name == "strength" and given is not None and given.shape[3:] != numbers
            if (0 if given is None else given.ndim) != rank or wide:
                found = None if given is None else given.shape
                last = numbers[0] if name == "strength" and numbers else "key"
                axes = {0: "None", 3: "[batch, length, heads]"}
                axes[4] = f"[batch, length, heads, {last}]"
                raise ValueError(f"{type(self).__name__} takes {name} {axes[rank]}, got {found}.")
        if tokens.key.shape[1] != self.steps * length:
            raise ValueError(
                f"{type(self).__name__} writes {self.steps} times per token: {length} queries need "
                f"{self.steps * length} keys, got {tokens.key.shape[1]}."
            )
        leaves = jax.tree.leaves((tokens, state))
        dtype = compute_dtype(*(x.dtype for x in leaves))
        init = functools.partial(
            self.init, batch, heads, width, tokens.value.shape[-1], dtype=dtype
        )
        if state is None:
            state = init()
        # Otherwise the state of another rule or batch could be broadcast without a word.
        check_tree("initial_state", state, jax.eval_shape(init))
        return jax.tree.map(lambda x: x.astype(dtype), (tokens, state))


def strength_parts(strength: Strength, key: int, value: int) -> tuple[int, ...]:
    """The numbers of each part of a strength, for keys and values of such widths."""
    widths = {"head": 1, "pair": key // 2, "key": key, "value": value}
    if isinstance(strength, bool):
        return ()
    parts = strength if isinstance(strength, tuple) else (strength,)
    return tuple(widths[part] for part in parts)


def strength_axis(strength: Strength, key: int, value: int) -> tuple[int, ...]:
    """The shape that a strength has after the axis of heads: `()` or `(numbers,)`."""
    numbers = sum(strength_parts(strength, key, value))
    return (numbers,) if numbers else ()


def given(x: Array | None) -> Array:
    """A gate whose presence `_prepare` has checked."""
    assert x is not None
    return x


def forgotten(log_decay: Array | None) -> Array:
    """`1 - exp(log_decay)`, the share that is not kept."""
    # The difference of two numbers near 1 would have rounding only where little is forgotten.
    return -jnp.expm1(given(log_decay))


def agreement(matrix: Array, token: Tokens, value: Array | None = None) -> Array:
    """`v^T W k`, whose gradient is an additive write; `value` in place of the token's own."""
    return token.key @ matrix @ (token.value if value is None else value)


def squared(x: Array) -> Array:
    """Half the squared norm."""
    return jnp.sum(jnp.square(x)) / 2
