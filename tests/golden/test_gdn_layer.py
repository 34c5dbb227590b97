"""Gated DeltaNet, whole and decoded token by token, against the authors' implementation."""

import jax
import jax.numpy as jnp
from flax import nnx

from fwpkm_jax.layers.mixers.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from fwpkm_jax.paper.release.names import GATED_DELTA_NET
from tests.golden.vectors import assert_all_match, config_values, load
from tests.golden.weights import filled

KIND = "gdn_layer"


def test_gated_delta_net_matches_the_reference(golden_path, dtype):
    config, arrays = load(golden_path)
    config = config_values(
        golden_path,
        config,
        required=(
            *("B", "T", "decode_tokens", "hidden_size", "linear_conv_kernel_dim", "rms_norm_eps"),
            *("linear_num_key_heads", "linear_num_value_heads"),
            *("linear_key_head_dim", "linear_value_head_dim"),
        ),
        known={},
    )
    layer = GatedDeltaNet(
        GatedDeltaNetConfig(
            num_key_heads=config["linear_num_key_heads"],
            num_value_heads=config["linear_num_value_heads"],
            key_head_dim=config["linear_key_head_dim"],
            value_head_dim=config["linear_value_head_dim"],
            conv_width=config["linear_conv_kernel_dim"],
        ),
        config["hidden_size"],
        norm_eps=config["rms_norm_eps"],
        init_std=0.02,
        rngs=nnx.Rngs(0),
    )
    batch, length, decoded = config["B"], config["T"], config["decode_tokens"]
    assert arrays["hidden"].shape == (batch, length, config["hidden_size"])
    hidden = jnp.asarray(arrays["hidden"], dtype)
    weights = {n[2:]: jnp.asarray(w, dtype) for n, w in arrays.items() if n.startswith("w:")}
    mask = arrays.get("mask")
    mask = None if mask is None else jnp.asarray(mask)

    def whole(hidden, weights):
        return filled(layer, weights, GATED_DELTA_NET)(hidden, mask=mask)[0]

    @jax.jit
    def evaluate(hidden, weights, cotangent):
        # Output projections that pick what goes into them show it, `hidden_size` at a time.
        model, joined = weights["out_proj.weight"].shape
        picks = [jnp.eye(model, joined, k=first, dtype=dtype) for first in range(0, joined, model)]
        parts = [whole(hidden, weights | {"out_proj.weight": pick}) for pick in picks]
        results = {"raw_output": jnp.concatenate(parts, axis=-1)[..., :joined]}
        results["output"], pullback = jax.vjp(whole, hidden, weights)
        if cotangent is not None:
            results["d_hidden"], d_weights = pullback(cotangent)
            results |= {f"d:{name}": gradient for name, gradient in d_weights.items()}
        return results

    cotangent = arrays.get("cotangent")
    cotangent = None if cotangent is None else jnp.asarray(cotangent, dtype)
    results = evaluate(hidden, weights, cotangent)

    inputs = ("hidden", "cotangent", "mask")
    if decoded:
        streamed = decode(filled(layer, weights, GATED_DELTA_NET), hidden, mask, decoded, dtype)
        assert_all_match(
            {name: results[name] for name in arrays if name in results} | streamed,
            arrays,
            inputs=inputs,
            path=golden_path,
            dtype=dtype,
        )
        results = streamed | results  # The whole pass has to give the decoded output too.
    assert_all_match(results, arrays, inputs=inputs, path=golden_path, dtype=dtype)


def decode(layer, hidden, mask, decoded, dtype) -> dict[str, jax.Array]:
    """Output and last caches of one long piece followed by `decoded` single tokens."""
    batch, length, _ = hidden.shape
    cache, outputs = layer.init_cache(batch, max_length=length, dtype=dtype), []
    ends = range(length - decoded, length + 1)
    before, step = cache, jax.jit(lambda x, mask, cache: layer(x, mask=mask, cache=cache))
    for start, end in zip((0, *ends), ends, strict=False):
        piece_mask = None if mask is None else mask[:, start:end]
        before = cache
        output, cache = step(hidden[:, start:end], piece_mask, cache)
        outputs.append(output)
    # The reference keeps one input more than the next token needs.
    conv_inputs = jnp.concatenate([before.conv_inputs, cache.conv_inputs[:, -1:]], axis=1)
    return {
        "output": jnp.concatenate(outputs, axis=1),
        "conv_state": jnp.swapaxes(conv_inputs, 1, 2),
        "recurrent_state": cache.memory,
    }
