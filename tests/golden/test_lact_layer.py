"""The LaCT layer, whole and in pieces, against the published one."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from fwpkm_jax.layers.mixers.lact import LaCT, LaCTConfig
from tests.golden.vectors import assert_matches, config_values, open_file

KIND = "lact_layer"
_FIXED = {
    "base_lr": 0.001,
    "fp32_states": True,
    "fw_init_gain": 0.5,
    "inter_multi": 1,
    "layer_idx": 0,
    "lr_dim": 1,
    "lr_parameterization": "mamba",
    "max_position_embeddings": 128,
    "qkv_bias": False,
    "qkv_silu": True,
    "ttt_norm_eps": 1e-05,
    "use_fused_kernel": False,
    "use_muon": False,
}


def with_weights(layer: LaCT, weights: dict[str, jax.Array]) -> LaCT:
    """A copy of the layer with the published parameters (linear weights are [out, in])."""
    weights = dict(weights)
    layer = nnx.clone(layer)
    names = {
        **{"qkv_proj": "qkv", "o_proj": "o_proj", "rate_proj": "lr_proj"},
        **{"momentum_proj": "momentum_proj.0", "scale_proj": "ttt_scale_proj"},
    }
    for ours, theirs in names.items():
        linear = getattr(layer, ours)
        if linear is None:
            continue
        linear.kernel.set_value(weights.pop(f"{theirs}.weight").T)
        if linear.bias is not None:
            linear.bias.set_value(weights.pop(f"{theirs}.bias"))
    # Their norms multiply by the weight, ours by 1 + weight.
    norms = {"fast_norm": "ttt_norm"}
    if layer.config.qk_norm:
        norms |= {"q_norm": "q_norm", "k_norm": "k_norm"}
    for ours, theirs in norms.items():
        getattr(layer, ours).weight.set_value(weights.pop(f"{theirs}.weight") - 1)
    for part in ("scale", "offset"):
        both = weights.pop(f"qk_{part}")
        ours = {"scale": "scale", "offset": "shift"}[part]
        for column, name in enumerate(("query", "key")):
            getattr(layer, f"fast_{name}_{ours}").set_value(both[:, column])
    layer.down.set_value(weights.pop("w1"))
    for ours, theirs in {"gate": "w0", "up": "w2"}.items():
        if layer.config.low_rank is None:
            getattr(layer, ours).set_value(weights.pop(theirs))
            continue
        for side in ("left", "right"):
            getattr(layer, f"{ours}_{side}").set_value(weights.pop(f"{theirs}.w_{side}"))
    assert not weights, f"parameters without a place: {sorted(weights)}"
    return layer


@pytest.mark.slow
def test_the_layer_matches_the_published_one(golden_path, dtype):
    file = open_file(golden_path, dtype)
    required = ["B", "T", "hidden_size", "num_attn_heads", "num_lact_heads", "lact_chunk_size"]
    required += ["window_size", "w0_w2_low_rank", "attn_qk_norm", "no_v_silu", "rope_theta"]
    required += ["use_momentum", "learnable_ttt_scale"]
    options = ["ttt_nope", "ttt_prenorm"]
    config = config_values(
        golden_path,
        file.config,
        required=required + [name for name in options if name in file.config],
        known=_FIXED,
    )
    width = config["hidden_size"]
    layer = LaCT(
        LaCTConfig(
            num_heads=config["num_attn_heads"],
            num_fast_heads=config["num_lact_heads"],
            hidden_dim=width // config["num_lact_heads"],
            chunk_size=config["lact_chunk_size"],
            window=config["window_size"],
            low_rank=None if config["w0_w2_low_rank"] == -1 else config["w0_w2_low_rank"],
            base_rate=_FIXED["base_lr"],
            qk_norm=config["attn_qk_norm"],
            value_silu=not config["no_v_silu"],
            rotary_fast=not config.get("ttt_nope", False),
            pre_norm=config.get("ttt_prenorm", False),
            momentum=config["use_momentum"],
            read_scale=config["learnable_ttt_scale"],
            rope_theta=config["rope_theta"],
        ),
        width,
        norm_eps=1e-5,
        init_std=0.02,
        rngs=nnx.Rngs(0),
    )
    weights = {name[2:]: x for name, x in file.arrays.items() if name.startswith("w:")}

    @jax.jit
    def evaluate(hidden, weights):
        output, pullback = jax.vjp(lambda h, w: with_weights(layer, w)(h)[0], hidden, weights)
        d_hidden, d_weights = pullback(file.arrays["cotangent"])
        return {
            "output": output,
            "d_hidden": d_hidden,
            **{f"d:{name}": gradient for name, gradient in d_weights.items()},
        }

    @jax.jit
    def stream(hidden, weights):
        loaded = with_weights(layer, weights)
        cache, outputs = loaded.init_cache(config["B"], max_length=1, dtype=dtype), []
        for start, end in ((0, 5), (5, 6), (6, config["T"])):
            output, cache = loaded(hidden[:, start:end], cache=cache)
            outputs.append(output)
        return jnp.concatenate(outputs, axis=1)

    hidden = file.arrays["hidden"]
    file.assert_matches(evaluate(hidden, weights))
    streamed = stream(hidden, weights)
    assert_matches("output", streamed, file.expected["output"], golden_path, dtype)
