"""What every matrix memory owes its callers. A new line in MATRIX_RULES is tested here."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.rules.matrix import MATRIX_RULES, AbstractMatrixRule
from tests.rules.matrix_sampling import cast, sample_tokens

VARIANTS = {
    f"{name}{index or ''}": dataclasses.replace(rule, chunk_size=4)
    for name, cls in MATRIX_RULES.items()
    for index, rule in enumerate(cls.variants())
}
LENGTH, CUT = 7, 5  # A full chunk and a short one; several chunks where a token writes often.


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def rule(request) -> AbstractMatrixRule:
    return request.param


def sample_state(rule, tokens):
    """A memory that holds something, and a cotangent for one."""
    batch, _, heads, key = tokens.query.shape
    empty = rule.init(batch, heads, key, tokens.value.shape[-1], dtype=jnp.float32)
    rng = np.random.default_rng(1)
    # Positive, as normalisers are.
    return jax.tree.map(lambda x: rng.uniform(0.1, 1, size=x.shape), empty)


@functools.partial(jax.jit, static_argnums=0)
def outputs_and_gradients(rule, tokens, state, cotangents):
    """Of the definition and of chunks in double precision, and of chunks in single."""

    def run(form, dtype):
        arguments = cast((tokens, state), dtype)
        out, pull = jax.vjp(lambda *x: tuple(form(*x)), *arguments)
        return out, pull(cast(cotangents, dtype))

    return (
        run(rule.recurrent, jnp.float64),
        run(rule.run, jnp.float64),
        run(rule.run, jnp.float32),
    )


def test_chunks_equal_the_definition_gradients_included(rule):
    tokens = sample_tokens(rule, length=LENGTH)
    state = sample_state(rule, tokens)
    read = np.random.default_rng(2).normal(size=(*tokens.query.shape[:3], 3))
    with jax.enable_x64(True):
        # Numbers that single precision holds, too.
        arguments = cast((tokens, state, (read, state)), jnp.float32)
        expected, double, single = outputs_and_gradients(rule, *arguments)
        chex.assert_type(jax.tree.leaves((expected, double)), jnp.float64)
        chex.assert_type(jax.tree.leaves(single), jnp.float32)
        chex.assert_trees_all_close(double, expected, rtol=1e-10, atol=1e-10)
        single = cast(single, jnp.float64)
        chex.assert_trees_all_close(single, expected, rtol=1e-5, atol=1e-5)
        assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(expected))


def test_a_write_is_the_gradient_steps_of_its_losses(rule):
    with jax.enable_x64(True):
        tokens = sample_tokens(rule, batch=1, length=1, heads=1)
        state = cast(jax.tree.map(lambda x: x[0, 0], sample_state(rule, tokens)), jnp.float64)
        # One head's only token; several writes keep their axis.
        head = cast(jax.tree.map(lambda x: x[0, :, 0], tokens), jnp.float64)
        token = jax.tree.map(lambda x: x[0], head)
        if rule.steps > 1:
            token = head._replace(query=token.query, log_decay=token.log_decay)

        @jax.jit
        def step(state, token):
            matrix = rule.matrix(state)
            for loss, step_size in rule.losses(state, token):
                matrix = matrix - step_size * jax.grad(loss)(matrix)
            return matrix, rule.matrix(rule.write(state, token))

        stepped, written = step(state, token)
        np.testing.assert_allclose(stepped, written, rtol=1e-12, atol=1e-13)


def test_two_pieces_equal_the_whole(rule):
    tokens = sample_tokens(rule, length=LENGTH)
    state = sample_state(rule, tokens)

    @jax.jit
    def run(tokens, state):
        whole = rule.run(tokens, state)
        cut = [(x, CUT * (x.shape[1] // LENGTH)) for x in jax.tree.leaves(tokens)]
        parts = [x[:, :end] for x, end in cut], [x[:, end:] for x, end in cut]
        first, second = (jax.tree.unflatten(jax.tree.structure(tokens), x) for x in parts)
        early = rule.run(first, state)
        late = rule.recurrent(second, early.final_state)
        return whole, (jnp.concatenate([early.output, late.output], axis=1), late.final_state)

    with jax.enable_x64(True):
        whole, pieces = run(*cast((tokens, state), jnp.float64))
        chex.assert_trees_all_close(tuple(whole), pieces, rtol=1e-10, atol=1e-12)


def test_skipped_tokens_leave_the_memory_bit_for_bit(rule):
    tokens = cast(sample_tokens(rule, length=3), jnp.float32)
    state = cast(sample_state(rule, tokens), jnp.float32)

    @jax.jit
    def states(tokens, state):
        skipped = rule.skip(tokens, jnp.zeros((2, 3), bool))
        return [form(skipped, state).final_state for form in (rule.run, rule.recurrent)]

    for after in states(tokens, state):
        jax.tree.map(np.testing.assert_array_equal, after, state)


def test_gates_that_do_not_fit_are_named(rule):
    tokens = cast(sample_tokens(rule, length=2), jnp.float32)
    missing = {"log_decay": rule.decay != "none", "strength": rule.strength}
    for name, taken in missing.items():
        wrong = None if taken else jnp.zeros(tokens.query.shape[:3])
        with pytest.raises(ValueError, match=f"{type(rule).__name__} takes {name}"):
            rule.run(tokens._replace(**{name: wrong}))
    with pytest.raises(ValueError, match=f"writes {rule.steps} times per token: 2 queries need"):
        rule.run(tokens._replace(key=tokens.key[:, :1]))


def test_a_rule_is_a_frozen_hashable_value(rule):
    assert hash(rule) == hash(dataclasses.replace(rule))
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.chunk_size = 1
