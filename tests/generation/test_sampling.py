import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.generation import Sampling
from fwpkm_jax.generation.sampling import choose_tokens

LOGITS = np.log([0.05, 0.4, 0.1, 0.25, 0.2]).astype(np.float32)
DRAWS = 4000


def shares(**options):
    """How often each token is drawn."""
    rngs = jax.random.split(jax.random.key(0), DRAWS)
    logits = jnp.broadcast_to(LOGITS, (DRAWS, LOGITS.size))
    drawn = choose_tokens(logits, rngs, Sampling(**options))
    return np.bincount(drawn, minlength=LOGITS.size) / DRAWS


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, [0.05, 0.4, 0.1, 0.25, 0.2]),
        ({"temperature": 0.5}, np.array([0.05, 0.4, 0.1, 0.25, 0.2]) ** 2 / 0.275),
        ({"temperature": 1.0, "top_k": 2}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"temperature": 1.0, "top_k": 9}, [0.05, 0.4, 0.1, 0.25, 0.2]),
        # 0.4 + 0.25 do not reach 0.7, so the third most likely token is among them.
        ({"temperature": 1.0, "top_p": 0.7}, [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85]),
        ({"temperature": 1.0, "top_p": 1e-6}, [0, 1, 0, 0, 0]),
        # Of what top_k leaves, 0.4 is 0.62.
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.6}, [0, 1, 0, 0, 0]),
        ({"temperature": 1.0, "vocab_size": 3}, [0.05 / 0.55, 0.4 / 0.55, 0.1 / 0.55, 0, 0]),
        ({"vocab_size": 1}, [1, 0, 0, 0, 0]),
        ({}, [0, 1, 0, 0, 0]),
    ],
)
def test_draws_have_the_distribution_that_is_asked_for(options, expected):
    actual = shares(**options)
    assert np.all((actual == 0) == (np.array(expected) == 0))
    error = 4 * np.sqrt(np.array(expected) * (1 - np.array(expected)) / DRAWS)
    assert np.all(np.abs(actual - expected) <= error + 1e-12)


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}])
@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1e-44])
def test_a_tiny_temperature_takes_the_most_likely_token(temperature, options):
    logits = jnp.asarray([[-3.0, 1.0, 5.0, 4.5, -jnp.inf]] * 8, jnp.float32)
    sampling = Sampling(temperature=temperature, **options)
    drawn = jax.jit(lambda x, rngs: choose_tokens(x, rngs, sampling))(
        logits, jax.random.split(jax.random.key(0), 8)
    )
    np.testing.assert_array_equal(drawn, [2] * 8)


def test_of_equally_likely_tokens_top_k_keeps_k():
    rngs = jax.random.split(jax.random.key(1), 200)
    drawn = choose_tokens(jnp.zeros((200, 5)), rngs, Sampling(temperature=1.0, top_k=2))
    assert set(np.asarray(drawn).tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 is too small; use 0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0 is too small; use 1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0 must lie between 0 and 1, 0 excluded"),
        ({"top_p": 0.9}, "no effect at temperature=0"),
    ],
)
def test_options_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_more_tokens_than_the_model_has_are_refused():
    with pytest.raises(ValueError, match="vocab_size=9 exceeds the model's 5 tokens"):
        shares(vocab_size=9)
