"""Both forms of the gated delta rule, against a plain loop and against each other."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fwpkm_jax.core.recurrence.gated_delta import (
    chunk_gated_delta_rule,
    recurrent_gated_delta_rule,
)

few = settings(max_examples=4, deadline=None, derandomize=True)
FORMS = {"recurrent": recurrent_gated_delta_rule, "chunk": chunk_gated_delta_rule}


def sample(seed=0, *, batch=2, length=7, heads=2, key=4, value=3):
    """Float64 NumPy arguments: unit keys, decays from almost none to almost all."""
    rng = np.random.default_rng(seed)

    def unit(*shape):
        x = rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    return {
        "query": unit(batch, length, heads, key),
        "key": unit(batch, length, heads, key),
        "value": rng.normal(size=(batch, length, heads, value)),
        "log_decay": -(rng.exponential(size=(batch, length, heads)) ** 3),
        "beta": rng.uniform(size=(batch, length, heads)),
        "initial_state": rng.normal(size=(batch, heads, key, value)),
    }


def to_jax(arguments, dtype):
    return {name: jnp.asarray(x, dtype) for name, x in arguments.items()}


def apply(rule, arguments, **options):
    arguments = dict(arguments)
    arrays = [arguments.pop(name) for name in ("query", "key", "value")]
    return rule(*arrays, **arguments, **options)


def plain_loop(arguments):
    """The recurrence, one token and head at a time."""
    query, key, value, log_decay, beta, state = (x.astype(np.float64) for x in arguments.values())
    output, state = np.zeros(value.shape), state.copy()
    batch, length, heads, key_dim = query.shape
    for b, t, h in np.ndindex(batch, length, heads):
        memory = np.exp(log_decay[b, t, h]) * state[b, h]
        error = value[b, t, h] - memory.T @ key[b, t, h]
        state[b, h] = memory + beta[b, t, h] * np.outer(key[b, t, h], error)
        output[b, t, h] = key_dim**-0.5 * state[b, h].T @ query[b, t, h]
    return output, state


class PlainLoopTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_both_forms_equal_the_plain_loop(self):
        arguments = sample(length=5)
        expected = plain_loop(arguments)
        for name, rule in FORMS.items():
            with jax.enable_x64(True):
                run = self.variant(lambda arguments, rule=rule: apply(rule, arguments))
                actual = run(to_jax(arguments, np.float64))
                chex.assert_trees_all_close(
                    tuple(actual), expected, rtol=1e-11, custom_message=name
                )


@pytest.mark.slow
@few
@given(
    length=st.integers(1, 20),
    heads=st.integers(1, 3),
    key=st.integers(1, 5),
    value=st.integers(1, 5),
    chunk_size=st.sampled_from([1, 3, 8, 64]),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(["float64", "float32"]),
)
def test_chunk_form_equals_recurrent_form_and_its_gradients(chunk_size, seed, dtype, **shape):
    with jax.enable_x64(dtype == "float64"):
        arguments = to_jax(sample(seed, **shape), dtype)
        rng = np.random.default_rng(seed + 1)

        @jax.jit
        def output_and_gradients(arguments, cotangent):
            def run(rule, **options):
                output, pullback = jax.vjp(lambda x: tuple(apply(rule, x, **options)), arguments)
                return output, pullback(cotangent)[0]

            recurrent = run(recurrent_gated_delta_rule)
            return recurrent, run(chunk_gated_delta_rule, chunk_size=chunk_size)

        cotangent = tuple(
            jnp.asarray(rng.normal(size=arguments[name].shape), dtype)
            for name in ("value", "initial_state")
        )
        recurrent, chunk = output_and_gradients(arguments, cotangent)
        tolerance = 1e-10 if dtype == "float64" else 1e-5
        assert chunk[0][0].dtype == dtype
        chex.assert_trees_all_close(chunk, recurrent, rtol=tolerance, atol=tolerance)


@pytest.mark.thorough
@few
@given(length=st.integers(2, 15), data=st.data(), seed=st.integers(0, 99))
def test_a_sequence_cut_anywhere_continues_from_its_state(length, data, seed):
    cut = data.draw(st.integers(1, length - 1))
    with jax.enable_x64(True):
        arguments = to_jax(sample(seed, length=length), np.float64)

        @jax.jit
        def whole_and_pieces(arguments):
            tokens = {name: x for name, x in arguments.items() if name != "initial_state"}
            first, second = ({name: x[:, half] for name, x in tokens.items()} for half in halves)
            start = {"initial_state": arguments["initial_state"]}
            early = apply(chunk_gated_delta_rule, first | start, chunk_size=4)
            middle = {"initial_state": early.final_state}
            late = apply(chunk_gated_delta_rule, second | middle, chunk_size=4)
            output = jnp.concatenate([early.output, late.output], axis=1)
            whole = apply(chunk_gated_delta_rule, arguments, chunk_size=4)
            return tuple(whole), (output, late.final_state)

        halves = (slice(cut), slice(cut, None))
        whole, pieces = whole_and_pieces(arguments)
        chex.assert_trees_all_close(pieces, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_later_tokens_do_not_reach_earlier_outputs(form):
    arguments, changed = sample(length=9), sample(1, length=9)
    for name in ("query", "key", "value", "log_decay", "beta"):
        changed[name][:, :5] = arguments[name][:, :5]
    changed["initial_state"] = arguments["initial_state"]
    run = jax.jit(lambda arguments: apply(FORMS[form], arguments).output)
    before, after = (run(to_jax(x, np.float32)) for x in (arguments, changed))
    np.testing.assert_allclose(before[:, :5], after[:, :5], rtol=1e-5, atol=1e-6)
    assert np.all(np.max(np.abs(before - after), axis=(0, 2, 3))[5:] > 1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_without_decay_and_write_leave_the_state(form):
    arguments = sample()
    arguments["log_decay"][:], arguments["beta"][:] = 0, 0
    arguments = to_jax(arguments, np.float32)
    state = jax.jit(lambda arguments: apply(FORMS[form], arguments).final_state)(arguments)
    np.testing.assert_array_equal(state, arguments["initial_state"])


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("log_decay", [-1e4, -np.inf])
def test_complete_decay_forgets_everything_with_finite_gradients(form, log_decay):
    arguments = sample(length=6)
    arguments["log_decay"][:, 3] = log_decay
    arguments = to_jax(arguments, np.float32)
    forgotten = {name: x[:, 3:] for name, x in arguments.items() if name != "initial_state"}
    forgotten["initial_state"] = jnp.zeros_like(arguments["initial_state"])

    @jax.jit
    def run(arguments):
        outputs = apply(FORMS[form], arguments)
        return jnp.sum(outputs.output[:, 3:]) + jnp.sum(outputs.final_state), outputs

    gradients, outputs = jax.grad(run, has_aux=True)(arguments)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())
    np.testing.assert_array_equal(gradients["value"][:, :3], 0)
    expected = apply(recurrent_gated_delta_rule, forgotten)
    np.testing.assert_allclose(outputs.output[:, 3:], expected.output, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outputs.final_state, expected.final_state, rtol=1e-5, atol=1e-6)


def test_float32_stays_exact_after_a_strong_decay():
    # A difference of running sums would be off by the rounding of -20000: 1e-3 relative.
    arguments = sample(length=16)
    arguments["log_decay"][:] = -0.01
    arguments["log_decay"][:, 0] = -20_000
    expected, _ = plain_loop(to_numpy_float32(arguments))
    output = apply(chunk_gated_delta_rule, to_jax(arguments, np.float32)).output
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=2e-6)


def to_numpy_float32(arguments):
    return {name: x.astype(np.float32) for name, x in arguments.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_inputs_compute_in_float32_with_finite_gradients(form):
    arguments = to_jax(sample(length=10), jnp.bfloat16)
    exact = {name: x.astype(jnp.float32) for name, x in arguments.items()}
    run = jax.jit(lambda arguments: apply(FORMS[form], arguments))
    outputs, expected = run(arguments), run(exact)
    chex.assert_type(tuple(outputs), jnp.float32)
    chex.assert_trees_all_equal(tuple(outputs), tuple(expected))
    gradients = jax.grad(lambda x: jnp.sum(jnp.square(run(x).output)))(arguments)
    chex.assert_type(list(gradients.values()), jnp.bfloat16)
    chex.assert_tree_all_finite(gradients)


def test_wrong_arguments_are_named():
    arguments = to_jax(sample(), np.float32)
    with pytest.raises(ValueError, match="chunk_size=0"):
        apply(chunk_gated_delta_rule, arguments, chunk_size=0)
    with pytest.raises((ValueError, TypeError)):
        apply(chunk_gated_delta_rule, arguments | {"beta": arguments["beta"][:, :3]})
    with pytest.raises((ValueError, TypeError)):
        apply(recurrent_gated_delta_rule, arguments | {"beta": jnp.ones((2, 7, 2), jnp.int32)})
