"""The whole decoder, tiny, against the authors' release."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.mixers.attention import AttentionConfig
from fwpkm_jax.layers.mixers.gated_delta_net import GatedDeltaNetConfig
from fwpkm_jax.layers.pkm import PKMConfig
from fwpkm_jax.models.language_model import LanguageModel, ModelConfig
from fwpkm_jax.paper.release.release_config import MODEL_TYPE, release_config
from fwpkm_jax.rules import FwPKM
from tests.golden import release
from tests.golden.test_fwpkm_block import block_config
from tests.golden.vectors import assert_matches, config_values, open_file
from tests.golden.weights import filled_language_model, release_weights

KIND = "lm"
MIXERS = {"linear_attention": "gdn", "sliding_attention": "swa", "full_attention": "attention"}
_OURS = (
    *(
        "B",
        "T",
        "passes",
        "decode_tokens",
        "mask",
        "hidden_size",
        "vocab_size",
        "intermediate_size",
    ),
    *("num_hidden_layers", "layer_types", "tie_word_embeddings", "fwpkm_layers"),
    *("head_dim", "num_attention_heads", "num_key_value_heads", "partial_rotary_factor"),
    *("rope_theta", "sliding_window", "max_position_embeddings", "rms_norm_eps"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("pkm_layers", "pkm_heads", "pkm_k_dim", "pkm_n_subkeys", "pkm_topk", "pkm_v_dim"),
    "pkm_query_rmsnorm",
)


def model_config(config: dict) -> ModelConfig:
    value_dim = config["hidden_size"] if config["pkm_v_dim"] == -1 else config["pkm_v_dim"]
    return ModelConfig(
        vocab_size=config["vocab_size"],
        model_dim=config["hidden_size"],
        mixers=tuple(MIXERS[name] for name in config["layer_types"]),
        mlp_dim=config["intermediate_size"],
        memory_layers=tuple(config["fwpkm_layers"]),
        pkm_layers=tuple(config["pkm_layers"]),
        window=config["sliding_window"] or 1,
        attention=AttentionConfig(
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            rotary_fraction=config["partial_rotary_factor"],
            rope_theta=config["rope_theta"],
        ),
        gdn=GatedDeltaNetConfig(
            num_key_heads=config["linear_num_key_heads"],
            num_value_heads=config["linear_num_value_heads"],
            key_head_dim=config["linear_key_head_dim"],
            value_head_dim=config["linear_value_head_dim"],
            conv_width=config["linear_conv_kernel_dim"],
        ),
        fast_weight=block_config(config),
        pkm=PKMConfig(
            num_subkeys=config["pkm_n_subkeys"],
            key_dim=config["pkm_k_dim"],
            value_dim=value_dim,
            num_heads=config["pkm_heads"],
            top_k=config["pkm_topk"],
            query_norm=config["pkm_query_rmsnorm"],
        ),
        tie_embeddings=config["tie_word_embeddings"],
        norm_eps=config["rms_norm_eps"],
    )


def test_the_importer_reads_the_configuration_alike(golden_path):
    config = json.loads(str(np.load(golden_path)["config"]))
    assert release_config(config | {"model_type": MODEL_TYPE}) == model_config(config)


@pytest.mark.slow
def test_the_decoder_matches_the_release(golden_path, dtype):
    file = open_file(golden_path, dtype)
    config = config_values(
        golden_path,
        file.config,
        required=[name for name in file.config if name in (*_OURS, *release.BLOCK_FIELDS)],
        known=release.BLOCK_FIXED,
    )
    assert config["num_hidden_layers"] == len(config["layer_types"])
    if config["decode_tokens"] and config["fwpkm_layers"]:
        raise ValueError(
            f"{golden_path.name}: decode_tokens={config['decode_tokens']} with a memory: the "
            "release's queue of a whole decoder is not replayed; teach the test about it."
        )
    model = _build(config)
    weights = {name[2:]: x for name, x in file.arrays.items() if name.startswith("w:")}
    results = jax.jit(lambda weights: _passes(model, file, weights))(weights)
    expected = file.expected
    if "mask" in file.arrays:  # What stands at padding means nothing.
        real = (_mask(file) != 0)[..., None]
        logits = jnp.where(real, results["logits"], 0)
        results, file = (
            results | {"logits": logits},
            file._replace(expected=expected | {"logits": np.where(real, expected["logits"], 0)}),
        )
    file.assert_matches(results)
    if not config["fwpkm_layers"]:
        # Whether the file asks for it or not: without a memory, a stream gives what the whole does.
        decoded = max(config["decode_tokens"], 2)
        streamed = jax.jit(lambda weights: _decoded(model, file, weights, decoded))(weights)
        assert_matches("logits", streamed, file.expected["logits"], golden_path, dtype)


@pytest.mark.slow
def test_a_mask_of_ones_changes_nothing(golden_path):
    """Of decoders without FwPKM, whose release scales its steps by whether there is a mask."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        file = open_file(golden_path, np.dtype("float64"))
        if file.config["fwpkm_layers"] and file.config["fwpkm_variant"] != "mlp":
            pytest.skip("the release's steps depend on there being a mask")
        ones = jnp.ones(file.arrays["tokens"].shape[1:])
        masked = file._replace(arrays=file.arrays | {"mask": ones})
        model = _build(file.config)
        weights = {name[2:]: x for name, x in file.arrays.items() if name.startswith("w:")}
        file.assert_matches(jax.jit(lambda weights: _passes(model, masked, weights))(weights))


def _build(config):
    """A decoder of shapes; the file has the numbers."""
    return nnx.eval_shape(lambda: LanguageModel(model_config(config), rngs=nnx.Rngs(0), dtype=None))


def _mask(file):
    """`[passes, batch, length]`, or None; a file may give one mask for all passes."""
    mask = file.arrays.get("mask")
    return None if mask is None else jnp.broadcast_to(mask, file.arrays["tokens"].shape)


def _decoded(model, file, weights, decoded):
    """Logits of every pass from a prompt and `decoded` single tokens behind it."""
    passes = []
    masks = _mask(file)
    for index, tokens in enumerate(jnp.asarray(file.arrays["tokens"])):
        filled, memory = filled_language_model(model, weights)
        batch, length = tokens.shape
        stream, logits = filled.init_stream(memory, batch=batch, max_length=length), []
        ends = range(length - decoded, length + 1)
        for start, end in zip((0, *ends), ends, strict=False):
            mask = None if masks is None else masks[index][:, start:end]
            out = filled.stream(tokens[:, start:end], stream, mask=mask)
            logits.append(out.logits)
            stream = out.stream
        logits = jnp.concatenate(logits, axis=1)
        passes.append(
            logits if masks is None else jnp.where(masks[index][..., None] != 0, logits, 0)
        )
    return jnp.stack(passes)


def _passes(model, file, weights):
    """All passes, the memory carried from one to the next; gradients of the last."""
    tokens, rule = jnp.asarray(file.arrays["tokens"]), model.config.fast_weight.rule
    # The release rescales the steps of product-key memories only.
    pairing = release.pairing if isinstance(rule, FwPKM) else release.mlp_pairing
    masks = _mask(file)
    filled, memory = filled_language_model(model, weights)
    records = []
    for index, batch in enumerate(tokens):
        last = index == len(tokens) - 1
        options = {"mask": None if masks is None else masks[index], "pairing": pairing}
        if last and "cotangent" in file.arrays:
            assert len(tokens) == 1, "gradients of a later pass would need its own start"

            def logits_of(weights, batch=batch, options=options):
                other, start = filled_language_model(model, weights)
                return other(batch, start, **options).logits

            _, pullback = jax.vjp(logits_of, weights)
            (gradients,) = pullback(file.arrays["cotangent"])
        out = filled(batch, memory, **options)
        memory = out.memory
        records.append(out)
    results = {"logits": jnp.stack([out.logits for out in records])}
    if "cotangent" in file.arrays:
        results |= {f"d:{name}": x for name, x in gradients.items()}
    if model.config.pkm_layers:
        slots = [jnp.stack(list(out.pkm_slot_ids.values()), axis=2) for out in records]
        results["pkm_indices"] = jnp.stack(slots)
    names = [f"layer_{index}" for index in model.config.memory_layers]
    if names:

        def stacked(take):
            return jnp.stack(
                [jnp.stack([take(out.info[n]) for n in names], axis=2) for out in records]
            )

        options = {
            "chunk_size": model.config.fast_weight.chunk_size,
            "lookahead": rule.lookahead,
        }
        results |= {
            "fwpkm_losses": stacked(lambda info: release.paired_only(info.token_loss, **options)),
            "fwpkm_gates": stacked(lambda info: info.gate[..., None]),
        }
        if isinstance(rule, FwPKM):
            shape = (rule.num_heads, rule.top_k)
            results["fwpkm_indices"] = stacked(
                lambda info: info.access.slot_ids.reshape(*info.access.slot_ids.shape[:2], *shape)
            )
        for index, name in zip(model.config.memory_layers, names, strict=True):
            prefix = f"model.layers.{index}.fwpkm."
            after = release_weights(jax.tree.map(lambda x: x[0], memory[name]))
            results |= {f"after:{prefix}{part}": x for part, x in after.items()}
    return results
