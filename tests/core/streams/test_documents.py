"""Rows of several documents unit by unit, against a loop over each document alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.streams.documents import UnitSize, in_documents

CHUNK, LENGTH, START = 3, 14, 0.5
pytestmark = pytest.mark.usefixtures("float64")


def within(state, tokens, count):
    """Every token reads the state times itself; a full unit's sum goes into the state.

    The state also counts the tokens that the unit still needs.
    """
    state, needed = state
    real = jnp.arange(tokens.shape[2], dtype=jnp.int32)[None] < count[:, None]
    total = jnp.sum(jnp.where(real, tokens[:, 0], 0), axis=1)
    full = (count == needed) & (count > 0)
    after = jnp.where(full, 0.5 * state + jnp.sin(total), state)
    return (after, jnp.where(full, CHUNK, needed - count)), state[:, None, None] * tokens


def by_document(tokens, state=START, lead=0):
    """The same of one document, token by token of each unit; and the last state."""
    out, first, size = [], 0, CHUNK + lead
    while first < len(tokens):
        unit = tokens[first : first + size]
        out.append(state * unit)
        if len(unit) == size:
            state = 0.5 * state + np.sin(unit.sum())
        first, size = first + size, CHUNK
    return np.concatenate(out), state


@functools.partial(jax.jit, static_argnames=("alone", "narrow", "lead"))
def run(tokens, starts, count, cotangent, alone=False, narrow=None, lead=0):
    fresh = jnp.full((2,), START), jnp.full((2,), CHUNK + lead, jnp.int32)
    read = (lambda tokens: START * tokens) if alone else None

    def loss(tokens):
        state, out = in_documents(
            within,
            fresh,
            fresh,
            tokens[:, None],
            count=count,
            starts=starts,
            unit=UnitSize(CHUNK, lead=lead, narrow=narrow),
            alone=read,
        )
        return jnp.sum(out[:, 0] * cotangent), (state[0], out[:, 0])

    return jax.value_and_grad(loss, has_aux=True)(tokens)


@pytest.mark.thorough("whole")
@pytest.mark.parametrize(
    "options",
    [{}, {"alone": True}, {"narrow": 2}, {"alone": True, "lead": 2}, {"lead": -1}, {"lead": -2}],
    ids=["whole", "alone", "narrow", "later", "sooner", "much_sooner"],
)
def test_each_document_reads_as_it_would_alone(options):
    """With units in turn or, where a row has too many, side by side."""
    rng = np.random.default_rng(0)
    for trial in range(12):
        tokens, cotangent = rng.normal(size=(2, 2, LENGTH))
        share = (0.0, 0.15, 0.5, 1.0)[trial % 4]
        starts = rng.uniform(size=(2, LENGTH)) < share
        count = np.array([LENGTH, rng.integers(1, LENGTH + 1)], np.int32)
        real = np.arange(LENGTH) < count[:, None]
        arrays = (jnp.asarray(x) for x in (tokens, starts, count, cotangent * real))
        (_, (state, out)), gradient = run(*arrays, **options)
        for row in range(2):
            inner = np.flatnonzero(starts[row, 1 : count[row]]) + 1
            documents = np.split(tokens[row, : count[row]], inner)
            lead = options.get("lead", 0)
            expected = [by_document(document, lead=lead) for document in documents]
            np.testing.assert_allclose(
                out[row, : count[row]], np.concatenate([x for x, _ in expected]), atol=1e-13
            )
            np.testing.assert_allclose(state[row], expected[-1][1], atol=1e-13)
            # Of one token: the difference quotient of its own document alone.
            at, step = int(rng.integers(count[row])), 1e-6
            own = int(np.searchsorted(inner, at, side="right"))
            first = 0 if own == 0 else inner[own - 1]
            moved = np.zeros(len(documents[own]))
            moved[at - first] = step
            weight = cotangent[row, first : first + len(moved)]
            sides = [
                by_document(documents[own] + sign * moved, lead=lead)[0] @ weight
                for sign in (1, -1)
            ]
            np.testing.assert_allclose(
                gradient[row, at], (sides[0] - sides[1]) / (2 * step), rtol=1e-6, atol=1e-8
            )
            assert not np.any(gradient[row, count[row] :])
