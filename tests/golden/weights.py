"""The release's parameters by name, put into this package's modules.

Linear weights there are [out, in]. Assignments are traced, so that gradients come back under the
release's names.
"""

import jax

from fwpkm_jax.layers.fast_weight import FastWeight
from fwpkm_jax.layers.pkm import PKM
from fwpkm_jax.models.block import Block
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.rules import FwMLP, FwMLPMemory, FwPKMMemory
from tests.golden.test_attention import with_weights as _attention_with_weights
from tests.golden.test_gdn_layer import with_weights as _gdn_with_weights

Weights = dict[str, jax.Array]


def take(weights: Weights, prefix: str) -> Weights:
    """The weights below a prefix, without it; they leave `weights`."""
    names = [name for name in weights if name.startswith(prefix)]
    return {name.removeprefix(prefix): weights.pop(name) for name in names}


def fill_linear(linear, weights: Weights, name: str) -> None:
    linear.kernel.set_value(weights.pop(f"{name}.weight").T)
    if linear.bias is not None:
        linear.bias.set_value(weights.pop(f"{name}.bias"))


def fill_fast_weight(layer: FastWeight, weights: Weights) -> FwPKMMemory | FwMLPMemory | None:
    """Fills a memory block in place; its fast weights, as one group."""
    for ours, theirs in {"query": "fw_q", "value": "fw_v"}.items():
        getattr(layer, f"{ours}_norm").weight.set_value(weights.pop(f"{theirs}_norm.weight"))
        fill_linear(getattr(layer, f"{ours}_proj"), weights, f"{theirs}_proj")
    # A block built without the gated mix and without gated losses has no gate parameters.
    if "fw_out_gate.weight" in weights:
        layer.gate_norm.weight.set_value(weights.pop("fw_out_gate_norm.weight"))
        fill_linear(layer.gate_proj, weights, "fw_out_gate")
    layer.out_norm.weight.set_value(weights.pop("fw_out_norm.weight"))
    fill_linear(layer.out_proj, weights, "fw_out_proj")
    return fast_weights(layer, take(weights, "fwpkm."))


def fast_weights(layer: FastWeight, weights: Weights) -> FwPKMMemory | FwMLPMemory:
    rule = layer.config.rule
    if isinstance(rule, FwMLP):
        return jax.tree.map(lambda x: x[None], fwmlp_memory(weights))
    keys = weights.pop("keys").reshape(1, rule.num_heads, 2, rule.num_subkeys, -1)
    values = weights.pop("values")[None]
    assert not weights, f"fast weights without a place: {sorted(weights)}"
    return FwPKMMemory(keys, values)


def fwmlp_memory(weights: Weights) -> FwMLPMemory:
    """One network from the release's six tensors."""
    assert set(weights) == {f"{kind}_{part}" for kind in "wb" for part in ("up", "gate", "down")}
    return FwMLPMemory(
        *(
            x
            for part in ("up", "gate", "down")
            for x in (weights[f"w_{part}"].T, weights[f"b_{part}"])
        )
    )


def release_weights(memory: FwPKMMemory | FwMLPMemory) -> Weights:
    """One group's fast weights under the release's names and in its shapes."""
    if isinstance(memory, FwPKMMemory):
        half = memory.keys.shape[-1]
        return {"keys": memory.keys.reshape(-1, half), "values": memory.values}
    names = [f"{kind}_{part}" for part in ("up", "gate", "down") for kind in "wb"]
    return {name: x.T if x.ndim == 2 else x for name, x in zip(names, memory, strict=True)}


def fill_pkm(layer: PKM, weights: Weights) -> None:
    """Fills a PKM layer in place."""
    config = layer.config
    keys = weights.pop("keys").reshape(config.num_heads, 2, config.num_subkeys, -1)
    layer.keys.set_value(keys)
    layer.values.set_value(weights.pop("values.weight"))
    if layer.query_scale is not None:
        layer.query_scale.set_value(weights.pop("query_proj.norm.weight"))
    layer.query_proj.kernel.set_value(weights.pop("query_proj.query_mlps.0.weight").T)
    # Without a query bias ours stays at its initial zeros.
    if "query_proj.query_mlps.0.bias" in weights:
        layer.query_proj.bias.set_value(weights.pop("query_proj.query_mlps.0.bias"))
    if layer.gate_proj is not None:
        fill_linear(layer.gate_proj, weights, "swilu_projection")
    fill_linear(layer.out_proj, weights, "value_proj")
    assert not weights, f"parameters without a place: {sorted(weights)}"


def fill_block(block: Block, weights: Weights) -> FwPKMMemory | FwMLPMemory | None:
    memory = None
    if block.memory is not None:
        memory = fill_fast_weight(block.memory, weights)
    block.mixer_norm.weight.set_value(weights.pop("input_layernorm.weight"))
    block.feed_forward_norm.weight.set_value(weights.pop("post_attention_layernorm.weight"))
    attention, linear_attention = take(weights, "self_attn."), take(weights, "linear_attn.")
    if attention:
        block.mixer = _attention_with_weights(block.mixer, attention)
    else:
        block.mixer = _gdn_with_weights(block.mixer, linear_attention)
    if isinstance(block.feed_forward, PKM):
        fill_pkm(block.feed_forward, take(weights, "pkm."))
    else:
        for name in ("gate_proj", "up_proj", "down_proj"):
            fill_linear(getattr(block.feed_forward, name), weights, f"mlp.{name}")
    assert not weights, f"parameters without a place: {sorted(weights)}"
    return memory


def fill_language_model(
    model: LanguageModel, weights: Weights
) -> dict[str, FwPKMMemory | FwMLPMemory]:
    """Fills the model in place; its fast weights by layer name."""
    weights = dict(weights)
    model.embedding.set_value(weights.pop("model.embed_tokens.weight"))
    model.final_norm.weight.set_value(weights.pop("model.norm.weight"))
    if model.head is not None:
        model.head.set_value(weights.pop("lm_head.weight").T)
    memory = {}
    for index, block in enumerate(model.blocks):
        fast = fill_block(block, take(weights, f"model.layers.{index}."))
        if fast is not None:
            memory[f"layer_{index}"] = fast
    assert not weights, f"parameters without a place: {sorted(weights)}"
    return memory
