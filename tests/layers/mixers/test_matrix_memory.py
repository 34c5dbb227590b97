"""Every matrix memory as a layer and in the tiny decoder: streams, padding, training."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.mixers.matrix_memory import MatrixMemory, MatrixMemoryConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.rules.matrix import MATRIX_RULES
from fwpkm_jax.rules.matrix.deltanet import DeltaNet
from fwpkm_jax.rules.matrix.gated_rfa import GatedRFA
from fwpkm_jax.rules.matrix.linear_attention import LinearAttention

# Shared key heads, a chunk and a convolution shorter than the sequence.
SMALL = MatrixMemoryConfig(
    **{"num_key_heads": 1, "num_value_heads": 2, "key_head_dim": 4, "value_head_dim": 3},
    rules=tuple(replace(cls.variants()[-1], chunk_size=4) for cls in MATRIX_RULES.values()),
)
DIM, LENGTH, BATCH = 6, 9, 2


@pytest.mark.thorough("deltanet")
@pytest.mark.parametrize("name", MATRIX_RULES)
def test_a_padded_stream_in_pieces_equals_the_tokens_alone(name):
    """Pieces with padding in all places, one of a single token, against each row unpadded."""
    layer = MatrixMemory(
        SMALL.rule(name), SMALL, DIM, norm_eps=1e-5, init_std=0.5, rngs=nnx.Rngs(0)
    )
    mask = np.array([[0, 1, 1, 0, 1, 1, 0, 1, 1], [1, 0, 1, 1, 0, 1, 1, 1, 0]], bool)
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, DIM))
    x = np.where(mask[:, :, None], x, 1e3)  # Values at padding must not matter.

    @jax.jit
    def run(x):
        cache = layer.init_cache(BATCH, max_length=LENGTH, dtype=x.dtype)
        outputs = []
        for piece in (slice(0, 8), slice(8, LENGTH)):
            out, cache = layer(x[:, piece], mask=jnp.asarray(mask[:, piece]), cache=cache)
            outputs.append(out)
        alone = jnp.stack([x[row, np.flatnonzero(mask[row])] for row in range(BATCH)])
        return jnp.concatenate(outputs, axis=1), layer(alone)[0]

    with jax.enable_x64(True):
        streamed, alone = run(jnp.asarray(x, jnp.float64))
        np.testing.assert_array_equal(np.asarray(streamed)[~mask], 0)
        for row in range(BATCH):
            np.testing.assert_allclose(streamed[row, mask[row]], alone[row], rtol=1e-9, atol=1e-11)
        assert np.all(np.max(np.abs(alone), axis=(1, 2)) > 1e-3)


@pytest.mark.parametrize("name", MATRIX_RULES)
def test_a_bfloat16_stream_keeps_its_dtypes_and_memories_float32(name):
    def run(x):
        layer = MatrixMemory(
            *(SMALL.rule(name), SMALL, DIM),
            **{"norm_eps": 1e-5, "init_std": 0.5, "dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)},
        )
        cache = layer.init_cache(BATCH, max_length=LENGTH, dtype=x.dtype)
        return cache, *layer(x, cache=cache)

    cache, output, after = jax.eval_shape(
        run, jax.ShapeDtypeStruct((BATCH, LENGTH, DIM), jnp.bfloat16)
    )
    assert output.dtype == cache.conv_inputs.dtype == jnp.bfloat16
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(cache.memory))
    chex.assert_trees_all_equal_shapes_and_dtypes(after, cache)


@pytest.mark.thorough("deltanet")
@pytest.mark.slow_cases("deltaproduct", "mesa", "mamba2")
@pytest.mark.parametrize("name", MATRIX_RULES)
def test_it_trains_in_the_tiny_decoder_and_decodes_with_its_state(name):
    config = ModelConfig(
        vocab_size=11,
        model_dim=8,
        mixers=(name,),
        mlp_dim=8,
        matrix=replace(SMALL, rules=(SMALL.rule(name),)),
        init_std=0.3,
        activation_dtype="float32",
    )
    graphdef, params = nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(0), (BATCH, LENGTH + 1), 0, config.vocab_size)

    def loss(params):
        logits = nnx.merge(graphdef, params)(tokens[:, :-1], {}).logits
        chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen), logits

    @jax.jit
    def step(params):
        (value, logits), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        return value, logits, gradient, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    losses = []
    for _ in range(4):
        before = params
        value, logits, gradient, params = step(params)
        losses.append(float(value))
    assert losses[-1] < losses[0] - 0.1
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.all(np.isfinite(leaf)), jax.tree_util.keystr(path)
        assert np.any(np.asarray(leaf) != 0), f"{jax.tree_util.keystr(path)} learns nothing"

    decoder = nnx.merge(graphdef, before)
    decode = jax.jit(lambda token, stream: nnx.merge(graphdef, before).stream(token, stream))
    stream, read = decoder.init_stream({}, batch=BATCH, max_length=LENGTH), []
    for position in range(LENGTH):
        out = decode(tokens[:, position : position + 1], stream)
        read.append(out.logits)
        stream = out.stream
    chex.assert_trees_all_close(jnp.concatenate(read, axis=1), logits, rtol=2e-4, atol=2e-5)


def test_settings_of_a_rule_reach_its_layer_and_must_belong_to_one():
    own = DeltaNet(negative_eigenvalues=True)
    config = MatrixMemoryConfig(rules=(own,))
    assert config.rule("deltanet") is own
    assert config.rule("ojanet") == MATRIX_RULES["ojanet"]()
    with pytest.raises(ValueError, match="two of a kind"):
        MatrixMemoryConfig(rules=(own, DeltaNet()))
    with pytest.raises(ValueError, match="which no layer of mixers"):
        ModelConfig(mixers=("gla",), matrix=config)


def test_negative_eigenvalues_double_the_range_of_the_strength():
    strengths = []
    for negative in (False, True):
        rule = DeltaNet(negative_eigenvalues=negative)
        layer = MatrixMemory(
            rule, replace(SMALL, rules=()), DIM, norm_eps=1e-5, init_std=9.0, rngs=nnx.Rngs(0)
        )
        x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 40, DIM)), jnp.float32)
        inputs = layer._gate_inputs(x)
        strengths.append(np.asarray(rule.gates(inputs)[1]))
    assert 0 <= strengths[0].min() < 0.1
    assert 0.9 < strengths[0].max() <= 1
    np.testing.assert_allclose(strengths[1], 2 * strengths[0], rtol=1e-6)


def test_unknown_mixers_are_named_with_those_that_exist():
    known = r"attention.*gdn.*lact.*titans.*mlstm.*gla"
    with pytest.raises(ValueError, match=rf"mixers\[1\]='gal' is none of {known}.* name is gla\."):
        ModelConfig(mixers=("gla", "gal"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: LinearAttention(normalized=True),
        lambda: GatedRFA(feature_map="l2"),
    ],
)
def test_normalised_reads_need_features_that_are_never_negative(make):
    with pytest.raises(ValueError, match="choose one of"):
        make()


@pytest.mark.slow
def test_a_learned_table_is_trained_and_what_a_cache_goes_back_to():
    layer = MatrixMemory(SMALL.rule("sdm_heads"), SMALL, DIM, init_std=0.5, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, DIM))
    starts = jnp.zeros((BATCH, LENGTH), bool).at[:, 5].set(True)
    begin = layer.init_cache(BATCH, max_length=LENGTH, dtype=x.dtype)
    after = layer(x, cache=begin)[1]
    assert np.any(after.memory != begin.memory)
    first = np.broadcast_to(layer.first_memory[...], begin.memory.shape)
    np.testing.assert_array_equal(layer.reset_cache(after).memory, first)

    @nnx.jit
    def late_gradient(layer):
        """Of what the second document reads: it begins with the table, too."""
        return nnx.grad(lambda layer: jnp.sum(jnp.sin(layer(x, starts=starts)[0][:, 5:])))(layer)

    found = np.asarray(late_gradient(layer)["first_memory"][...])
    assert np.all(np.any(found != 0, axis=(1, 2)))  # Of both heads.
