"""Titans' memory, whole and in pieces, against the published PyTorch package."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from fwpkm_jax.layers.mixers.titans import Titans, TitansConfig
from fwpkm_jax.training.state import named_leaves
from tests.golden.vectors import config_values, open_file

KIND = "titans"
_OPTIONS = {
    "batch_size": None,
    "momentum": True,
    "momentum_order": 1,
    "learned_momentum_combine": False,
    "attn_pool_chunks": False,
    "max_grad_norm": None,
    "per_parameter_lr_modulation": False,
    "spectral_norm_surprises": False,
    "mem_model_norm_add_residual": True,
    "qk_rmsnorm": False,
    "post_rmsnorm": False,
    "dim_head": None,
}
_LINEAR = {
    "query_proj": "to_queries",
    "key_proj": "to_keys",
    "value_proj": "to_values",
    "rate_proj": "to_adaptive_step.0",
    "momentum_proj": "to_momentum.0",
    "combine_proj": "to_learned_momentum_combine.0",
    "forget_proj": "to_decay_factor.0",
    "tensor_rate_proj": "to_layer_modulation.0",
    "pool_proj": "reduce_to_chunk_rep.to_attn_logits",
    "gate_proj": "retrieve_gate.0",
    "out_proj": "combine_heads",
}
_HEAD_NORMS = {"query_norm": "q_norm", "key_norm": "k_norm", "output_norm": "multihead_rmsnorm"}


def layer_of(config: dict, dtype) -> Titans:
    return Titans(
        TitansConfig(
            num_heads=config["heads"],
            head_dim=config["dim_head"] or config["dim"],
            depth=config["depth"],
            expansion=config["expansion_factor"],
            residual_norm=config["mem_model_norm_add_residual"],
            write_size=config["chunk_size"],
            chunk_size=config["batch_size"],
            momentum_order=config["momentum_order"] if config["momentum"] else 0,
            combine_momenta=config["learned_momentum_combine"],
            max_rate=config["max_lr"],
            tensor_rates=config["per_parameter_lr_modulation"],
            pooling="attention" if config["attn_pool_chunks"] else "mean",
            max_gradient_norm=config["max_grad_norm"],
            orthogonalize=config["spectral_norm_surprises"],
            qk_norm=config["qk_rmsnorm"],
            output_norm=config["post_rmsnorm"],
        ),
        config["dim"],
        norm_eps=float(jnp.finfo(dtype).eps),
        init_std=0.02,
        rngs=nnx.Rngs(0),
    )


def filled(layer: Titans, weights: dict[str, jax.Array]) -> Titans:
    """A copy of the layer with the published parameters (linear weights are [out, in])."""
    weights = dict(weights)
    layer = nnx.clone(layer)
    # A softmax does not change when all of its logits do.
    weights.pop("reduce_to_chunk_rep.to_attn_logits.bias", None)
    for ours, theirs in _LINEAR.items():
        linear = getattr(layer, ours)
        if linear is not None:
            linear.kernel.set_value(weights.pop(f"{theirs}.weight").T)
            if linear.bias is not None:
                linear.bias.set_value(weights.pop(f"{theirs}.bias"))
    for name in ("store_norm", "retrieve_norm"):
        # Their norms multiply by the weight, ours by 1 + weight.
        getattr(layer, name).weight.set_value(weights.pop(f"{name}.weight") - 1)
    for ours, theirs in _HEAD_NORMS.items():
        if getattr(layer, ours) is not None:
            getattr(layer, ours).set_value(weights.pop(f"{theirs}.gamma")[:, 0])
    tensors = [*([layer.scale] if layer.scale is not None else []), *layer.layers]
    for index, tensor in enumerate(tensors):
        tensor.set_value(weights.pop(f"memory_model_parameters.{index}"))
    assert not weights, f"parameters without a place: {sorted(weights)}"
    return layer


def state_of(layer: Titans, memory) -> dict[str, jax.Array]:
    """The memories under the published names, batch and heads on one axis."""
    names = {f"layers/{i}": f"weights.{i}" for i in range(layer.config.depth)}
    if layer.config.residual_norm:
        names = {"scale": "norm.gamma"} | {ours: f"model.{n}" for ours, n in names.items()}
    results = {}
    for ours, theirs in names.items():
        weight = named_leaves(memory.weights)[ours]
        results[f"state:{theirs}"] = weight.reshape(-1, *weight.shape[2:])
        momentum = jnp.moveaxis(named_leaves(memory.momentum)[ours], 2, 0)
        shape = (momentum.shape[0], *results[f"state:{theirs}"].shape)
        results[f"momentum:{theirs}"] = momentum.reshape(shape)
    return results


@pytest.mark.slow
def test_the_memory_matches_the_published_one(golden_path, dtype):
    file = open_file(golden_path, dtype)
    config = config_values(
        golden_path,
        _OPTIONS | file.config,
        required=(
            *("B", "T", "chunk_size", "depth", "dim", "expansion_factor", "heads", "max_lr"),
            *("pieces", *_OPTIONS),
        ),
        known={"max_mem_layer_modulation": 1.0},
    )
    layer = layer_of(config, dtype)
    weights = {name[2:]: x for name, x in file.arrays.items() if name.startswith("w:")}
    run = _whole if config["pieces"] is None else _in_pieces
    file.assert_matches(jax.jit(lambda *x: run(layer, file, *x))(file.arrays["seq"], weights))


def _whole(layer, file, seq, weights):
    def run(seq, weights):
        count = jnp.full(seq.shape[:1], seq.shape[1], jnp.int32)
        return filled(layer, weights).whole(seq, count)

    if "cotangent" not in file.arrays:
        output, memory = run(seq, weights)
        return {"output": output} | state_of(layer, memory)
    output, pullback, memory = jax.vjp(run, seq, weights, has_aux=True)
    d_seq, d_weights = pullback(file.arrays["cotangent"])
    gradients = {f"d:{name}": x for name, x in d_weights.items()}
    return {"output": output, "d_seq": d_seq} | gradients | state_of(layer, memory)


def _in_pieces(layer, file, seq, weights):
    """The package counts a piece's tokens from the piece's start when it says what they read.

    Ours count from the sequence's, so what each token reads is taken from the stream here.
    """
    layer, size = filled(layer, weights), file.config["chunk_size"]
    batch, length, _ = seq.shape
    cache, caches = layer.init_cache(batch, max_length=length, dtype=seq.dtype), []
    caches.append(cache)

    def push(cache, x):
        _, cache = layer(x[:, None], cache=cache)
        return cache, cache

    last, caches = jax.lax.scan(push, cache, jnp.moveaxis(seq, 1, 0))
    # After n tokens; the first entry is the start.
    after = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), cache, caches).memory.weights
    query, outputs, start = layer.queries(seq), [], 0
    for piece in file.config["pieces"]:
        for place in range(piece):
            here = start + place
            written = start // size + (place + 1) // size
            tokens = here + 1 if piece == 1 else written * size
            read = jax.vmap(jax.vmap(layer.rule.apply))(
                jax.tree.map(lambda x, n=tokens: x[n], after), query[:, :, here, None]
            )
            outputs.append(read[:, :, 0])
        start += piece
    output = layer.merge(seq, jnp.stack(outputs, axis=1))
    return {"output": output} | state_of(layer, last.memory)
