"""Where decays and keys of mixers begin, and what stored runs mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.mixers import (
    GatedDeltaNet,
    GatedDeltaNetConfig,
    MatrixMemory,
    MatrixMemoryConfig,
    MatrixMixerConfig,
    Titans,
    TitansConfig,
)
from fwpkm_jax.paper.models import PSWA, paper_model
from fwpkm_jax.rules.matrix import MATRIX_RULES

HEADS, DIM = 1024, 2
SHAPE = {"num_key_heads": HEADS, "num_value_heads": HEADS, "key_head_dim": 1, "value_head_dim": 1}
TITANS = {"num_heads": 2048, "head_dim": 1, "depth": 1}


def drawn():
    """A large sample of time steps and rates, as published layers draw them."""
    rng = np.random.default_rng(0)
    steps = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), size=200_000))
    return steps, rng.uniform(0, 16, size=steps.shape)


def expected_medians():
    """By mixer: the median share kept with drawn time steps, and with a constant bias."""
    steps, rates = drawn()
    softplus = {bias: np.median(np.exp(-rates * np.log1p(np.exp(bias)))) for bias in (1, -4)}
    sigmoid = {bias: 1 / (1 + np.exp(-bias)) for bias in (0, 3, 4)}
    of_rate, alone = np.median(np.exp(-rates * steps)), np.median(np.exp(-steps))
    titans = np.exp(-4.6) / (1 + np.exp(-4.6))
    return {
        "gdn": (of_rate, softplus[1]),
        "gated_deltanet": (of_rate, softplus[1]),
        "deltaproduct": (of_rate, softplus[1]),
        "kda": (of_rate, softplus[1]),
        "gated_deltanet2": (of_rate, softplus[1]),
        "preconditioned_gated_deltanet": (of_rate, softplus[1]),
        "preconditioned_kda": (of_rate, softplus[1]),
        "raven": (of_rate, softplus[1]),
        "sdm_heads": (of_rate, softplus[1]),
        "gated_slot_attention": (alone, sigmoid[0] ** (1 / 8)),
        "mamba2": (of_rate, softplus[-4]),
        "mamba3": (np.median(0.5**steps), 0.5 ** np.log1p(np.exp(-4))),  # Of rate log 2.
        "omega": (of_rate, softplus[1]),
        "comba": (of_rate, softplus[1]),
        "gated_deltanet_channels": (of_rate, softplus[1]),
        "hgrn2": (alone, sigmoid[0]),
        "mesa": (alone, sigmoid[4]),
        "rwkv7": (alone, np.exp(-np.exp(-0.5) * (1 - sigmoid[4]))),
        "gla": (alone, sigmoid[0] ** (1 / 16)),
        "gated_rfa": (alone, sigmoid[3]),
        "mlstm": (alone, sigmoid[4]),
        "titans": (alone, 1 - titans),
    }


def shares(name, start):
    """The share of its memory that each head keeps at a token that the gates ignore."""
    zero = jnp.zeros((1, 1, DIM))
    rngs = nnx.Rngs(0)
    if name == "gdn":
        config = GatedDeltaNetConfig(**SHAPE, decay_start=start)
        log_decay = GatedDeltaNet(config, DIM, rngs=rngs).project(zero).log_decay
    elif name == "titans":
        layer = Titans(TitansConfig(**TITANS, decay_start=start), DIM, rngs=rngs)
        log_decay = jax.nn.log_sigmoid(-layer.forget_proj(zero))
    else:
        rule = MATRIX_RULES[name].variants()[-1]
        even = {"key_head_dim": 2} if name == "sdm_heads" else {}  # Scores of rows and of columns.
        config = MatrixMemoryConfig(**SHAPE | even, decay_start=start, rules=(rule,))
        layer = MatrixMemory(rule, config, DIM, rngs=rngs)
        tokens = layer.tokens(zero, jnp.zeros((1, 1, sum(layer.widths))))
        if rule.decay == "none":
            return 1 - tokens.key
        log_decay = tokens.log_decay
    return jnp.exp(log_decay)


@pytest.mark.slow
def test_the_median_head_keeps_what_the_option_says():
    expected = expected_medians()
    learned = {
        name
        for name, rule in MATRIX_RULES.items()
        if (gates := rule.variants()[-1].learned_gates)
        and (gates.decay or gates.log_rate or gates.key_of_step)
    }
    assert learned == expected.keys() - {"gdn", "titans"}
    starts = "time_steps", "constant"
    found = jax.jit(lambda: {n: [jnp.median(shares(n, s)) for s in starts] for n in expected})()
    for name, medians in expected.items():
        for start, actual, median in zip(starts, found[name], medians, strict=True):
            # The smallest median, 1e-5, is compared by its order of magnitude.
            np.testing.assert_allclose(
                np.log(actual), np.log(median), rtol=0.15, err_msg=f"{name}, {start}"
            )
    assert all(medians[0] > 0.9 for medians in found.values())


def test_the_papers_models_keep_their_start_and_all_others_have_time_steps():
    for name in ("gdn", "gdn_swa__pkm6_fwpkm2_10", PSWA[0]):
        assert paper_model(name).gdn.decay_start == "constant"
    assert GatedDeltaNetConfig().decay_start == MatrixMemoryConfig().decay_start == "time_steps"


@pytest.mark.thorough
def test_a_constant_start_draws_what_it_drew_before_there_was_a_choice():
    """The same random keys are used, so that later layers of a model start as before."""
    rngs = nnx.Rngs(0)
    layer = GatedDeltaNet(GatedDeltaNetConfig(**SHAPE, decay_start="constant"), DIM, rngs=rngs)
    np.testing.assert_array_equal(layer.dt_bias[...], 1)
    assert rngs.params.count[...] == 5  # Three maps, the convolution, the rates.


@pytest.mark.thorough("gdn", "linear_attention", "deltaproduct")
@pytest.mark.parametrize("name", ["gdn", *MATRIX_RULES])
def test_keys_that_start_as_queries_are_a_copy_and_nothing_else_changes(name):
    shape = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 3, "value_head_dim": 5}

    def layer(key_start):
        if name == "gdn":
            config = GatedDeltaNetConfig(**shape, key_start=key_start)
        else:
            config = MatrixMixerConfig.named(name, MatrixMemoryConfig(**shape, key_start=key_start))
        return config.build(6, rngs=nnx.Rngs(0))

    own, tied = (dict(nnx.to_flat_state(nnx.state(layer(start)))) for start in ("own", "queries"))
    changed = [path for path in own if np.any(own[path][...] != tied[path][...])]
    fused = name == "gdn"
    convolution = [("conv_weight",)] * (("conv_weight",) in own)
    projection = ("in_proj_qkvz" if fused else "in_proj", "kernel")
    assert sorted(changed) == sorted([projection, *convolution])
    for path in changed:
        before, after = (np.asarray(state[path][...]) for state in (own, tied))
        keys = 6
        if fused and path == projection:  # Fused by key head: its query, its key, values, gates.
            before, after = (x.reshape(6, 2, -1) for x in (before, after))
            keys = 3
        np.testing.assert_array_equal(after[..., keys : 2 * keys], before[..., :keys])
        np.testing.assert_array_equal(after[..., :keys], before[..., :keys])
        np.testing.assert_array_equal(after[..., 2 * keys :], before[..., 2 * keys :])


@pytest.mark.slow
def test_a_head_whose_keys_start_as_queries_finds_each_token_itself():
    """Queries and keys have unit length, so a query is nearest to a key that equals it."""
    shape = {"num_key_heads": 1, "num_value_heads": 1, "key_head_dim": 16, "value_head_dim": 4}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 9, 6)), jnp.float32)

    def nearest(key_start):
        config = MatrixMixerConfig.named(
            "deltanet", MatrixMemoryConfig(**shape, key_start=key_start)
        )
        layer = config.build(6, rngs=nnx.Rngs(0))
        mixed = jnp.split(layer.in_proj(x), [sum(layer.widths)], axis=-1)[0]
        tokens = layer.tokens(x, mixed)
        scores = jnp.einsum("qhd,khd->qk", tokens.query[0], tokens.key[0])
        return np.asarray(scores.argmax(axis=1))

    np.testing.assert_array_equal(nearest("queries"), np.arange(9))
    assert np.any(nearest("own") != np.arange(9))
