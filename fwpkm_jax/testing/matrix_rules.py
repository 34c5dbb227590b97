"""The contract of a matrix rule as properties that `check_rule` runs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fwpkm_jax.rules.matrix.base import AbstractMatrixRule, Tokens, strength_axis
from fwpkm_jax.rules.matrix.features import POSITIVE
from fwpkm_jax.testing.properties import (
    Property,
    cast_floats,
    require,
    require_close,
    require_equal,
)
from fwpkm_jax.testing.rule_case import rule_is_a_frozen_value

_KEY, _VALUE = 4, 3
_LENGTH, _CUT = 7, 5  # One full and one short chunk; more if a token makes several writes.


def sample_tokens(
    rule: AbstractMatrixRule,
    *,
    batch: int = 2,
    length: int = _LENGTH,
    heads: int = 2,
    key: int = _KEY,
    value: int = _VALUE,
    seed: int = 0,
) -> Tokens:
    """Random tokens, float64 NumPy arrays: unit queries, keys and values; weak to strong decays."""
    rng = np.random.default_rng(seed)

    def unit(*shape: int) -> np.ndarray:
        x = rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    query, keys = unit(batch, length, heads, key), unit(batch, length * rule.steps, heads, key)
    if rule.feature_map in POSITIVE:
        query, keys = np.abs(query), np.abs(keys)
    log_decay, strength = None, None
    if rule.decay != "none":
        shape = (batch, length, heads) + (key,) * (rule.decay == "key")
        log_decay = -(rng.exponential(size=shape) ** 3)
    if rule.strength:
        shape = keys.shape[:3] + strength_axis(rule.strength, key, value)
        strength = rng.uniform(0, 2, size=shape)
        if rule.no_strength == -np.inf:
            strength = 3 * rng.normal(size=shape)
    values = unit(*keys.shape[:3], value)
    return Tokens(query, keys, values, log_decay, strength)  # pyright: ignore[reportArgumentType]


def chunks_equal_the_definition(rule: AbstractMatrixRule) -> None:
    """Checks that `run` equals `recurrent`: outputs, final memory and all gradients.

    The tolerance is 1e-10 in double and 1e-5 in single precision.
    """
    rule, tokens, state = _with_chunks(rule)
    read = np.random.default_rng(2).normal(size=(*tokens.query.shape[:3], _VALUE))
    # Rounded to single precision, so that both precisions get the same numbers.
    arguments = cast_floats((tokens, state, (read, state)), jnp.float32)

    @jax.jit
    def outputs_and_gradients(tokens: Tokens, state: Any, cotangents: Any) -> Any:
        def run(form: Any, dtype: Any) -> Any:
            inputs = cast_floats((tokens, state), dtype)
            out, pull = jax.vjp(lambda *x: tuple(form(*x)), *inputs)
            return out, pull(cast_floats(cotangents, dtype))

        exact = run(rule.recurrent, jnp.float64), run(rule.run, jnp.float64)
        return *exact, run(rule.run, jnp.float32)

    expected, double, single = outputs_and_gradients(*arguments)
    for leaf in jax.tree.leaves((expected, double)):
        require(leaf.dtype == jnp.float64, f"double precision comes back as {leaf.dtype}")
    for leaf in jax.tree.leaves(single):
        require(leaf.dtype == jnp.float32, f"single precision comes back as {leaf.dtype}")
    require_close(double, expected, "run against recurrent", rtol=1e-10, atol=1e-10)
    require_close(single, expected, "run in float32 against recurrent", rtol=1e-5, atol=1e-5)
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        name = jax.tree_util.keystr(path)
        require(np.any(np.asarray(leaf) != 0), f"output or gradient {name} is 0 everywhere")


def a_write_is_the_gradient_steps_of_its_losses(rule: AbstractMatrixRule) -> None:
    tokens = sample_tokens(rule, batch=1, length=1, heads=1)
    state = jax.tree.map(lambda x: x[0, 0], cast_floats(sample_state(rule, tokens), jnp.float64))
    # The only token of the only head; if a token makes several writes, their axis is kept.
    head = jax.tree.map(lambda x: x[0, :, 0], cast_floats(tokens, jnp.float64))
    token = jax.tree.map(lambda x: x[0], head)
    if rule.steps > 1:
        token = head._replace(query=token.query, log_decay=token.log_decay)

    @jax.jit
    def step(state: Any, token: Tokens) -> tuple[jax.Array, jax.Array]:
        matrix = rule.matrix(state)
        for loss, step_size in rule.losses(state, token):
            matrix = matrix - step_size * jax.grad(loss)(matrix)
        return matrix, rule.matrix(rule.write(state, token))

    stepped, written = step(state, token)
    require_close(written, stepped, "write against the steps on losses", rtol=1e-12, atol=1e-13)


def two_pieces_equal_the_whole(rule: AbstractMatrixRule) -> None:
    """Checks that a pass over the first piece, then token by token, equals one pass over all.

    So do the pieces' transitions, if the rule has any (`part`): devices that share a sequence
    compose them.
    """
    rule, tokens, state = _with_chunks(rule)

    @jax.jit
    def run(tokens: Tokens, state: Any) -> Any:
        whole = rule.run(tokens, state)
        cut = [(x, _CUT * (x.shape[1] // _LENGTH)) for x in jax.tree.leaves(tokens)]
        parts = [x[:, :end] for x, end in cut], [x[:, end:] for x, end in cut]
        first, second = (jax.tree.unflatten(jax.tree.structure(tokens), x) for x in parts)
        early = rule.run(first, state)
        late = rule.recurrent(second, early.final_state)
        pieces = jnp.concatenate([early.output, late.output], axis=1), late.final_state
        part = rule.part(first)
        if part is None:
            return whole, pieces, None
        composed = part.then(rule.part(second)).after(state)
        return whole, pieces, (part.after(state), composed, early.final_state)

    whole, pieces, parts = run(*cast_floats((tokens, state), jnp.float64))
    require_close(pieces, tuple(whole), "two pieces")
    if parts is not None:
        after, composed, early = parts
        require_close(after, early, "the memory after the first piece, by its transition")
        require_close(composed, whole.final_state, "the memory by both pieces' transitions")


def documents_start_from_the_empty_memory(rule: AbstractMatrixRule) -> None:
    """Checks that the memory is reset where a document starts, in chunks as token by token.

    Gradients are compared too, and the initial memory is not zero. A rule that does not support
    documents must raise a ValueError that names the rule.
    """
    rule, tokens, state = _with_chunks(rule)
    read = np.random.default_rng(2).normal(size=(*tokens.query.shape[:3], _VALUE))
    tokens, state, cotangents = cast_floats((tokens, state, (read, state)), jnp.float64)

    @jax.jit
    def both(tokens: Tokens, state: Any, starts: jax.Array) -> Any:
        def of(form: Any) -> Any:
            out, pull = jax.vjp(lambda *x: tuple(form(*x, starts)), tokens, state)
            return out, pull(cotangents)

        return of(rule.run), of(rule.recurrent)

    # Starts at a chunk's first and last token and at the first token; one-token documents.
    for places in ((0, 2, 3, 4), (1, 6), ()):
        starts = np.zeros((2, _LENGTH), bool)
        starts[0, list(places)] = True
        starts[1, [(place + 3) % _LENGTH for place in places]] = True
        try:
            chunked, expected = both(tokens, state, jnp.asarray(starts))
        except ValueError as error:
            name = type(rule).__name__
            require(name in str(error), f"the refusal of documents does not name {name}: {error}")
            return
        where = f"documents that start at {places}: run against recurrent"
        require_close(chunked, expected, where, rtol=1e-10, atol=1e-12)


def skipped_tokens_leave_the_memory_bit_for_bit(rule: AbstractMatrixRule) -> None:
    tokens = cast_floats(sample_tokens(rule, length=3), jnp.float32)
    state = cast_floats(sample_state(rule, tokens), jnp.float32)

    @jax.jit
    def states(tokens: Tokens, state: Any) -> Any:
        skipped = rule.skip(tokens, jnp.zeros((2, 3), bool))
        return {form.__name__: form(skipped, state)[1] for form in (rule.run, rule.recurrent)}

    for name, after in states(tokens, state).items():
        require_equal(after, state, f"the memory after skipped tokens in {name}")


def gates_that_do_not_fit_are_named(rule: AbstractMatrixRule) -> None:
    tokens = cast_floats(sample_tokens(rule, length=2), jnp.float32)
    name = type(rule).__name__
    for gate, taken in {"log_decay": rule.decay != "none", "strength": rule.strength}.items():
        wrong = None if taken else jnp.zeros(tokens.query.shape[:3])
        _require_refusal(rule, tokens._replace(**{gate: wrong}), f"{name} takes {gate}")
    _require_refusal(rule, tokens._replace(key=tokens.key[:, :1]), "writes")


def sample_state(rule: AbstractMatrixRule, tokens: Tokens) -> Any:
    """A random memory; its numbers are positive, because normalisers are positive."""
    batch, _, heads, key = tokens.query.shape
    empty = rule.init(batch, heads, key, tokens.value.shape[-1], dtype=jnp.float32)
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: rng.uniform(0.1, 1, size=x.shape), empty)


def _with_chunks(rule: AbstractMatrixRule) -> tuple[AbstractMatrixRule, Tokens, Any]:
    """The rule with `chunk_size` 4, sampled tokens with an incomplete last chunk, and a memory."""
    rule = dataclasses.replace(rule, chunk_size=4)
    tokens = sample_tokens(rule)
    return rule, tokens, sample_state(rule, tokens)


def _require_refusal(rule: AbstractMatrixRule, tokens: Tokens, message: str) -> None:
    try:
        rule.run(tokens)
    except ValueError as error:
        require(message in str(error), f"the ValueError {error} does not say {message!r}")
        return
    raise AssertionError(f"no ValueError says {message!r}")


MATRIX_PROPERTIES: dict[str, Property] = {
    check.__name__: check
    for check in (
        rule_is_a_frozen_value,
        chunks_equal_the_definition,
        a_write_is_the_gradient_steps_of_its_losses,
        two_pieces_equal_the_whole,
        documents_start_from_the_empty_memory,
        skipped_tokens_leave_the_memory_bit_for_bit,
        gates_that_do_not_fit_are_named,
    )
}
"""Properties of every `AbstractMatrixRule`, by name."""
