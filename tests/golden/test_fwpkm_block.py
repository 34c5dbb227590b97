"""The memory block as wired in the decoder, against the authors' release."""

import jax
import jax.numpy as jnp
from flax import nnx

from fwpkm_jax.layers.memories.fast_weight import FastWeight, FastWeightConfig
from tests.golden import release
from tests.golden.vectors import config_values, open_file
from tests.golden.weights import filled_fast_weight

KIND = "fwpkm_block"
_OURS = ("B", "T", "mask", "pieces", "hidden_size", "rms_norm_eps")
NORMS = {None: "none", "zero_mean": "standardize", "l2norm": "l2"}


def block_config(config: dict) -> FastWeightConfig:
    return FastWeightConfig(
        rule=release.block_rule(config),
        chunk_size=config["fwpkm_update_chunk_size"],
        query_norm=NORMS[config["fwpkm_compress_query"]],
        value_norm=NORMS[config["fwpkm_compress_value"]],
        # The release's fast MLP takes no loss weights, whatever this field says.
        weight_by_gate=config["fwpkm_weight_loss_with_gates"] and config["fwpkm_variant"] == "pkm",
        gate_output=config["fwpkm_out_fuse_gate"],
    )


def test_the_memory_block_matches_the_release(golden_path, dtype):
    file = open_file(golden_path, dtype)
    config = config_values(
        golden_path,
        file.config,
        required=[name for name in file.config if name in release.BLOCK_FIELDS or name in _OURS],
        known=release.BLOCK_FIXED,
    )
    layer = FastWeight(
        block_config(config),
        config["hidden_size"],
        norm_eps=config["rms_norm_eps"],
        init_std=0.02,
        rngs=nnx.Rngs(0),
    )
    arrays = file.arrays
    weights = {name[2:]: x for name, x in arrays.items() if name.startswith("w:")}
    if config["pieces"] is None:
        file.assert_matches(jax.jit(lambda *x: _whole(layer, file, *x))(arrays["hidden"], weights))
    else:
        file.assert_matches(jax.jit(lambda *x: _stream(layer, file, *x))(arrays["hidden"], weights))


def _whole(layer, file, hidden, weights):
    rule, mask = layer.config.rule, file.arrays.get("mask")

    def run(hidden, weights):
        filled, memory = filled_fast_weight(layer, weights)
        y, memory, info = filled(hidden, memory, mask=mask, pairing=release.pairing)
        return hidden + y, (memory, info)

    results = {}
    if "cotangent" in file.arrays:
        out, pullback, (memory, info) = jax.vjp(run, hidden, weights, has_aux=True)
        results["d_hidden"], d_weights = pullback(file.arrays["cotangent"])
        results |= {f"d:{name}": x for name, x in d_weights.items()}
    else:
        out, (memory, info) = run(hidden, weights)
    losses = release.paired_only(
        info.token_loss, chunk_size=layer.config.chunk_size, lookahead=rule.lookahead
    )
    return (
        results
        | _block_results(layer, hidden, out, *info.access)
        | {
            "losses": losses,
            "gate": info.gate[..., None],
            "after:fwpkm.keys": memory.keys.reshape(weights["fwpkm.keys"].shape),
            "after:fwpkm.values": memory.values[0],
        }
    )


def _stream(layer, file, hidden, weights):
    """The block in pieces: projections and merge are ours, the queue is the release's."""
    rule, config = layer.config.rule, file.config
    filled, memory = filled_fast_weight(layer, weights)
    start = jax.tree.map(lambda x: x[0], memory)
    mask = file.arrays.get("mask")
    signals = filled.signals(hidden, mask)
    gate = signals.gate if layer.config.weight_by_gate else None
    query = signals.query.reshape(*hidden.shape[:2], -1)
    records = list(
        release.stream(
            rule, start, query, signals.value, gate, mask, config["pieces"],
            chunk_size=layer.config.chunk_size,
        )
    )  # fmt: skip

    def joined(name):
        return jnp.concatenate([record[name] for record in records], axis=1)

    memory = records[-1]["memory"]
    out = hidden + filled.merge(joined("output"), signals, dtype=hidden.dtype)
    return _block_results(layer, hidden, out, joined("slot_ids"), joined("slot_weights")) | {
        "gate": signals.gate[..., None],
        "after:fwpkm.keys": memory.keys.reshape(weights["fwpkm.keys"].shape),
        "after:fwpkm.values": memory.values,
    }


def _block_results(layer, hidden, out, slot_ids, slot_weights):
    rule = layer.config.rule
    shape = (*hidden.shape[:2], rule.num_heads, rule.top_k)
    return {
        "hidden_out": out,
        "fwpkm_output": out - hidden,
        "indices": slot_ids.reshape(shape),
        "scores": slot_weights.reshape(shape),
    }
