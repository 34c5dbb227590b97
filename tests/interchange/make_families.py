"""Small models of the transformers library's families, and what the library computes with them.

    python -m tests.interchange.make_families

writes `data/families.json` (configurations, tensors and greedy texts) and `data/families.npz`
(logits). It needs torch and transformers; the version is kept in the file. Weights are drawn from
the tensors' names, so that no file of weights is needed: `drawn`.
"""

import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

DATA = Path(__file__).parent / "data"
LENGTH, PADDING, NEW_TOKENS = 16, 5, 8
"""Tokens of each of two sequences; of padding in front of the second where there is some; tokens
that are generated after them."""
_SMALL = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "dtype": "float32",
}  # fmt: skip
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_YARN = {
    "rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 8,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {
        "model_type": "qwen2", "tie_word_embeddings": True, "use_sliding_window": True,
        "sliding_window": 5, "max_window_layers": 1,
    },
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 12},
    "mistral_window": {"model_type": "mistral", "sliding_window": 5},
    "smollm3": {
        "model_type": "smollm3", "num_hidden_layers": 4, "attention_bias": True, "mlp_bias": True,
        "use_sliding_window": True, "sliding_window": 5, "no_rope_layer_interval": 2,
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {
        "model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 5,
        "rope_parameters": {
            "full_attention": _YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    },
    "gemma3": {
        "model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 12,
        "sliding_window": 5, "sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "mlp_only_layers": [1], "norm_topk_prob": True, **_EXPERTS,
    },
    "qwen3_moe_window": {
        "model_type": "qwen3_moe", "head_dim": 12, "decoder_sparse_step": 2,
        "use_sliding_window": True, "sliding_window": 5, **_EXPERTS,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text", "num_hidden_layers": 4, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 12, "shared_expert_intermediate_size": 20, **_EXPERTS,
    },
}  # fmt: skip
"""What each model's configuration is asked for beyond the sizes that all have."""


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor of a name: the same numbers wherever and whenever it is drawn."""
    numbers = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) == 1:
        return (0.5 + 0.3 * numbers).astype(np.float32)
    return (numbers / np.sqrt(shape[-1])).astype(np.float32)


def write_model(folder: Path, config: dict[str, Any], tensors: dict[str, list[int]]) -> None:
    """A folder with a configuration and tensors of these shapes."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: drawn(name, tuple(shape)) for name, shape in tensors.items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})


def inputs() -> tuple[np.ndarray, np.ndarray]:
    """Tokens and the mask of the padded pass, `[2, LENGTH]` each."""
    tokens = np.random.RandomState(0).randint(0, _SMALL["vocab_size"], (2, LENGTH))
    mask = np.ones_like(tokens)
    mask[1, :PADDING] = 0
    return tokens, mask


def described(name: str, folder: Path) -> dict[str, Any]:
    """`config.json` and the tensors' shapes as the library writes them."""
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(MODELS[name])
    config = AutoConfig.for_model(values.pop("model_type"), **(_SMALL | values))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", framework="np") as file:
        tensors = {x: file.get_slice(x).get_shape() for x in file.keys()}  # noqa: SIM118
    return {"config": json.loads((folder / "config.json").read_text()), "tensors": tensors}


def computed(folder: Path) -> dict[str, np.ndarray]:
    """What the library computes with a folder: logits `[2, LENGTH, vocab]`, those of the padded
    second sequence `[LENGTH, vocab]`, and greedy texts after the padded batch."""
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    model.eval()
    tokens, mask = (torch.tensor(x) for x in inputs())
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(tokens).logits
        padded = model(tokens, attention_mask=mask, position_ids=positions).logits[1]
        texts = model.generate(
            tokens, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
    return {
        "whole": whole.numpy(),
        "padded": padded.numpy(),
        "text": texts[:, LENGTH:].numpy(),
    }


def main() -> None:
    import transformers

    models, arrays = {}, {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            models[name] = described(name, Path(folder) / "random")
            write_model(Path(folder) / "drawn", **models[name])
            of_model = computed(Path(folder) / "drawn")
        models[name]["text"] = of_model.pop("text").tolist()
        arrays |= {f"{name}/{kind}": array for kind, array in of_model.items()}
    lines = [f'"{name}": {json.dumps(model, sort_keys=True)}' for name, model in models.items()]
    version = json.dumps(transformers.__version__)
    joined = ",\n".join(lines)
    text = f'{{"transformers": {version}, "models": {{\n{joined}\n}}}}\n'
    (DATA / "families.json").write_text(text)
    np.savez_compressed(DATA / "families.npz", **arrays)


if __name__ == "__main__":
    main()
