"""A rule with sampled tokens and its passes, each compiled once for all properties."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fwpkm_jax.core.chunks import Memory, RunOutput, scan_chunks
from fwpkm_jax.core.streams.pending import Signals
from fwpkm_jax.rules.base import AbstractRule
from fwpkm_jax.testing.properties import cast_floats, is_float, require

CHUNK, LENGTH, BATCH, GROUPS = 4, 10, 2, 3
"""Sequences have two full chunks and a short one; two sequences share each of three memories."""

MakeSequence = Callable[..., Any]


def sample_signals(
    rule: AbstractRule,
    *,
    batch: int = BATCH,
    length: int = LENGTH,
    seed: int = 0,
    masked: bool = False,
) -> Signals:
    """Random signals of `batch` sequences, float64 NumPy arrays.

    Queries have unit length, so that no rule's memory grows without bound. With `masked`, about a
    third of the tokens is padding, with large values there.
    """
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(batch, length, rule.num_heads, rule.key_dim))
    query = query / np.linalg.norm(query, axis=-1, keepdims=True)
    value = rng.normal(size=(batch, length, rule.value_dim))
    gate = rng.uniform(0.2, 1.0, size=(batch, length))
    mask = np.ones((batch, length))
    if masked:
        mask[rng.uniform(size=mask.shape) < 0.35] = 0
        query = np.where(mask[..., None, None] == 1, query, 30 * query)
        value = np.where(mask[..., None] == 1, value, 100 * value)
    return Signals(query, value, gate, mask)  # pyright: ignore[reportArgumentType]


class Pass(NamedTuple):
    """The outputs and gradients of a pass over a sequence.

    Attributes:
      out: the rule's `RunOutput`.
      gradients: gradients of a loss of outputs and final memory, with respect to the initial memory
        and the sequence.
    """

    out: RunOutput
    gradients: Any


class RuleCase:
    """A rule with inputs and passes that its properties share.

    Use it in double precision mode (`jax.enable_x64`).

    Args:
      rule: the rule.
      make_sequence: makes the input of `rule.run` from the rule, queries
        `[batch, length, heads, key]`, values `[batch, length, value]` and the options `gate`,
        `mask`, `chunk_size`; None: `rule.sequence`.
    """

    def __init__(self, rule: AbstractRule, make_sequence: MakeSequence | None = None):
        self.rule = rule
        make = make_sequence or type(rule).sequence
        self._make_sequence = jax.jit(
            lambda query, value, **options: make(rule, query, value, **options),
            static_argnames="chunk_size",
        )

    def to_sequence(self, signals: Signals, *, chunk_size: int = CHUNK, dtype: Any = None) -> Any:
        """The input of `rule.run` as NumPy arrays, made from signals in `dtype`; None: float64."""
        query, value, gate, mask = (np.asarray(x, dtype or np.float64) for x in signals)
        made = self._make_sequence(query, value, gate=gate, mask=mask, chunk_size=chunk_size)
        return jax.tree.map(np.asarray, made)

    def groups(self, **options: Any) -> Any:
        """The input of `rule.run_groups`: `GROUPS` memories, each with different tokens."""
        parts = [
            self.to_sequence(sample_signals(self.rule, seed=seed, **options))
            for seed in range(GROUPS)
        ]
        return jax.tree.map(lambda *x: np.stack(x), *parts)

    @functools.cached_property
    def empty(self) -> Memory:
        """The memory before the first token, in float64."""
        return cast_floats(self.rule.init(jax.random.key(0)), jnp.float64)

    @functools.cached_property
    def memory(self) -> Memory:
        """The memory after one sequence, so that reads are not zero."""
        signals = sample_signals(self.rule, seed=99)
        return self.by_steps(self.empty, self.to_sequence(signals)).out.memory

    @functools.cached_property
    def memories(self) -> Memory:
        """`memory`, copied for each group."""
        return jax.tree.map(lambda x: np.stack([x] * GROUPS), self.memory)

    def by_groups(self, sequence: Any) -> Pass:
        """`rule.run_groups` from `memories`, compiled once."""
        return self._by_groups(self.memories, sequence)

    @functools.cached_property
    def plain(self) -> Pass:
        """`by_groups` of tokens without padding."""
        return self.by_groups(self.groups())

    @functools.cached_property
    def masked(self) -> Pass:
        """`by_groups` of tokens with padding."""
        return self.by_groups(self.groups(masked=True))

    @functools.cached_property
    def by_steps(self) -> Callable[..., Pass]:
        """A pass with one memory as the contract defines it: a scan of the rule's `step`."""

        def scanned(memory: Memory, sequence: Any) -> RunOutput:
            return scan_chunks(self.rule.step, memory, sequence, chunk_size=CHUNK)

        return _with_gradients(scanned)

    @functools.cached_property
    def _by_groups(self) -> Callable[..., Pass]:
        def passed(memory: Memory, sequence: Any) -> RunOutput:
            return self.rule.run_groups(memory, sequence, chunk_size=CHUNK)

        return _with_gradients(passed)


def scaled(tree: Any, *index: Any) -> Any:
    """A copy whose floating-point numbers at `index` are multiplied by -1.5."""

    def scale(x: Any) -> np.ndarray:
        x = np.array(x)
        if is_float(x):
            x[index] *= x.dtype.type(-1.5)
        return x

    return jax.tree.map(scale, tree)


def _with_gradients(run: Callable[..., RunOutput]) -> Callable[..., Pass]:
    def loss(memory: Memory, sequence: Any) -> tuple[jax.Array, RunOutput]:
        out = run(memory, sequence)
        # Neighbouring outputs get different cotangents; all groups get the same.
        size = BATCH * LENGTH * out.output.shape[-1]
        direction = jnp.sin(1.0 + jnp.arange(size, dtype=out.output.dtype))
        direction = direction.reshape(BATCH, LENGTH, -1)
        read = jnp.sum(jnp.broadcast_to(direction, out.output.shape) * out.output)
        ends = [x for x in jax.tree.leaves(out.memory) if is_float(x)]
        return read + sum(jnp.sum(jnp.sin(3.0 * x)) for x in ends), out

    gradient = jax.grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)

    @jax.jit
    def both(memory: Memory, sequence: Any) -> Pass:
        gradients, out = gradient(memory, sequence)
        return Pass(out, gradients)

    return both


def rule_is_a_frozen_value(case: Any) -> None:
    """Checks a matrix rule, or the rule of a case."""
    rule = case.rule if isinstance(case, RuleCase) else case
    same = dataclasses.replace(rule)
    require(rule == same and hash(rule) == hash(same), "equal fields do not make equal rules")
    try:
        setattr(rule, dataclasses.fields(rule)[0].name, 1)
    except dataclasses.FrozenInstanceError:
        return
    raise AssertionError("a field can be assigned; use @dataclass(frozen=True)")
