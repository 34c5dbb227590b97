"""Writes a tiny model as a GGUF file, as llama.cpp's converter does."""

from pathlib import Path
from typing import Any

import numpy as np

from fwpkm_jax.interchange.hf.families import FAMILIES
from fwpkm_jax.interchange.hf.layout import parts
from fwpkm_jax.interchange.hf.settings import model_config

CONFIG = {
    "vocab_size": 270,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "tie_word_embeddings": True,
}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def byte_tokens() -> list[str]:
    """A character for each byte, as byte-level tokenizers write them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [x for x in range(256) if x not in shown]
    names = {x: chr(x) for x in shown} | {x: chr(256 + i) for i, x in enumerate(others)}
    return [names[x] for x in range(256)]


def head_dim_of(model_type: str) -> int:
    """The transformers library takes 128 for every Qwen3 in this format, whatever the file says."""
    return 128 if model_type == "qwen3" else CONFIG["head_dim"]


def tensors_of(model_type: str, *, tied: bool = True) -> dict[str, np.ndarray]:
    """Weights under the names of the transformers library."""
    values = {"model_type": model_type, **CONFIG, "tie_word_embeddings": tied}
    values["head_dim"] = head_dim_of(model_type)
    rng, made = np.random.default_rng(0), {}
    for part in parts(model_config(values), FAMILIES[model_type]).values():
        for name, shape in zip(part.names, part.shapes, strict=True):
            scale = 0.3 if len(shape) > 1 else 1.0
            made[name] = (scale * rng.normal(size=shape)).astype(np.float32)
    return made


def write_gguf(
    path: Path,
    architecture: str,
    tensors: dict[str, np.ndarray],
    *,
    quantised: str | None = None,
    **fields: Any,
) -> None:
    """Writes the file; `fields` replace what would stand there, and None leaves a field out."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    keys = {
        "block_count": CONFIG["num_hidden_layers"],
        "context_length": CONFIG["max_position_embeddings"],
        "embedding_length": CONFIG["hidden_size"],
        "feed_forward_length": CONFIG["intermediate_size"],
        "attention.head_count": CONFIG["num_attention_heads"],
        "attention.head_count_kv": CONFIG["num_key_value_heads"],
        "rope.dimension_count": head_dim_of(architecture),
        "attention.key_length": head_dim_of(architecture),
        "attention.value_length": head_dim_of(architecture),
        "vocab_size": CONFIG["vocab_size"],
    }
    for key, value in keys.items():
        writer.add_uint32(f"{architecture}.{key}", fields.pop(key, value))
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", CONFIG["rms_norm_eps"])
    writer.add_float32(f"{architecture}.rope.freq_base", CONFIG["rope_theta"])
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w"]
    joined = [merge.replace(" ", "") for merge in merges]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_tokens(), *joined]
    tokens += [f"<extra{i}>" for i in range(CONFIG["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model(fields.pop("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(fields.pop("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (256 + len(joined)), *[3] * (len(tokens) - 264)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(fields.pop("end", 2))
    writer.add_chat_template(TEMPLATE)
    assert not fields, f"unknown {fields}"
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, architecture.upper()), CONFIG["num_hidden_layers"]
    )
    for name, array in tensors.items():
        stem, ending = name.rsplit(".", 1)
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = array.shape[0] // CONFIG["head_dim"]
            # The two halves of a head's rows, one row of each in turn.
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        stored = f"{names.get_name(stem) or stem}.{ending}"
        if quantised and array.ndim > 1 and array.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType[quantised]
            writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
