"""Gated softmax attention, whole and in pieces, against the authors' implementation."""

import jax
import jax.numpy as jnp
from flax import nnx

from fwpkm_jax.core.attention.softmax import whole_sequence_attention
from fwpkm_jax.layers.mixers.attention import Attention, AttentionConfig
from fwpkm_jax.paper.release.names import ATTENTION
from tests.golden.vectors import assert_all_match, assert_matches, config_values, load
from tests.golden.weights import filled

KIND = "attention"


def test_attention_matches_the_reference(golden_path, dtype):
    config, arrays = load(golden_path)
    config = config_values(
        golden_path,
        config,
        required=(
            *("B", "T", "head_dim", "hidden_size", "num_attention_heads", "num_key_value_heads"),
            *("partial_rotary_factor", "rms_norm_eps", "rope_theta", "sliding_window"),
        ),
        known={},
    )
    layer = Attention(
        AttentionConfig(
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            window=config["sliding_window"],
            rotary_fraction=config["partial_rotary_factor"],
            rope_theta=config["rope_theta"],
        ),
        config["hidden_size"],
        norm_eps=config["rms_norm_eps"],
        init_std=0.02,
        rngs=nnx.Rngs(0),
    )
    batch, length = config["B"], config["T"]
    assert arrays["hidden"].shape == (batch, length, config["hidden_size"])
    hidden = jnp.asarray(arrays["hidden"], dtype)
    weights = {n[2:]: jnp.asarray(w, dtype) for n, w in arrays.items() if n.startswith("w:")}

    def whole(hidden, weights):
        return filled(layer, weights, ATTENTION)(hidden)[0]

    @jax.jit
    def evaluate(hidden, weights, cotangent):
        loaded = filled(layer, weights, ATTENTION)
        positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
        query, key, value, _ = loaded.project(hidden, positions)
        raw = whole_sequence_attention(
            query, key, value, positions=positions, window=loaded.config.window
        ).reshape(batch, length, -1)
        results = {"q_rot": query, "k_rot": key, "raw_output": raw}
        results["output"], pullback = jax.vjp(whole, hidden, weights)
        if cotangent is not None:
            results["d_hidden"], d_weights = pullback(cotangent)
            results |= {f"d:{name}": gradient for name, gradient in d_weights.items()}
        return results

    @jax.jit
    def stream(hidden, weights):
        loaded = filled(layer, weights, ATTENTION)
        cache, outputs = loaded.init_cache(batch, max_length=length, dtype=dtype), []
        for start, end in ((0, 4), (4, 5), (5, length)):
            output, cache = loaded(hidden[:, start:end], cache=cache)
            outputs.append(output)
        return jnp.concatenate(outputs, axis=1)

    cotangent = arrays.get("cotangent")
    cotangent = None if cotangent is None else jnp.asarray(cotangent, dtype)
    results = evaluate(hidden, weights, cotangent)
    inputs = ("hidden", "cotangent")
    assert_all_match(results, arrays, inputs=inputs, path=golden_path, dtype=dtype)
    streamed = stream(hidden, weights)
    assert_matches("output", streamed, arrays["output"], golden_path, dtype)
