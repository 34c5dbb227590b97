"""What an exported folder holds so that PyTorch reads and writes its memories.

The programs stand in `programs/`: `modeling_fwpkm.py` and, for models that no family of the
transformers library computes, `modeling_fwpkm_hybrid.py`. They are copied into the folder and never
imported here, so that nothing here needs torch.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fwpkm_jax.config_json import to_json
from fwpkm_jax.interchange.hf.families import FAMILIES
from fwpkm_jax.interchange.hf.layout import Parts, matrix, vector
from fwpkm_jax.layers.mixers import AbstractMixerConfig, AttentionConfig, GatedDeltaNetConfig
from fwpkm_jax.layers.rotary import rotary_frequencies
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.rules import FwPKM

HYBRID = "fwpkm"
"""`model_type` of a model that only these programs compute."""
_AUTO = "AutoModelForCausalLM"


def model_programs(model_type: str) -> dict[str, bytes]:
    """The programs of a folder by file name."""
    names = ["modeling_fwpkm.py", *(["modeling_fwpkm_hybrid.py"] if model_type == HYBRID else [])]
    folder = Path(__file__).with_name("programs")
    return {name: (folder / name).read_bytes() for name in names}


def auto_map(model_type: str) -> dict[str, str]:
    """Where the transformers library finds the classes of a folder."""
    if model_type != HYBRID:
        return {_AUTO: "modeling_fwpkm.FwPKMForCausalLM"}
    names = {"AutoConfig": "FwPKMConfig", _AUTO: "FwPKMHybridForCausalLM"}
    return {auto: f"modeling_fwpkm_hybrid.{name}" for auto, name in names.items()}


def unread_memory(model: ModelConfig, model_type: str) -> str | None:
    """Why the programs cannot read the model's memories; None: they can."""
    if model_type not in (HYBRID, *FAMILIES):
        return f"the memories of a {model_type} with images"
    if model.memory_mixer is not None:
        return "model.memory_mixer"
    rule = model.fast_weight.rule
    if not isinstance(rule, FwPKM):
        return f"memories of {type(rule).__name__}"
    names = ("key_loss", "nonlinearity", "inner_steps", "write_clip", "weight_decay", "retention")
    plain = FwPKM()
    for name in names:
        if getattr(rule, name) != getattr(plain, name):
            return f"model.fast_weight.rule.{name}={getattr(rule, name)!r}"
    return None


def hybrid_text(model: ModelConfig, *, context: int) -> dict[str, Any]:
    """The `config.json` of a model of Gated DeltaNet, attention, MLPs, PKMs and FwPKM.

    Raises:
      ValueError: it has something else; the message names it.
    """
    plain = ModelConfig()
    names = ("expert_layers", "post_norm_layers", "sandwich_norm_layers", "fast_weight_layer")
    changed = [
        f"model.{name}={getattr(model, name)!r}"
        for name in (*names, "head_bias")
        if getattr(model, name) != getattr(plain, name)
    ]
    if model.pkm_layers and model.pkm.query_batch_norm:
        changed.append("model.pkm.query_batch_norm=True")
    if model.memory_layers and (unread := unread_memory(model, HYBRID)) is not None:
        changed.append(unread)
    if changed:
        raise ValueError(f"{changed[0]}, which the programs for PyTorch do not compute.")
    return {
        "architectures": ["FwPKMHybrid"],
        "model_type": HYBRID,
        "vocab_size": model.vocab_size,
        "hidden_size": model.model_dim,
        "num_hidden_layers": len(model.mixers),
        "max_position_embeddings": context,
        "tie_word_embeddings": False,  # Both uses are one parameter, so that nothing is tied.
        "dtype": model.parameter_dtype,
        "mixers": [_mixer(config) for config in model.mixer_configs],
    }


def _mixer(config: AbstractMixerConfig) -> dict[str, Any]:
    """A mixer's settings as the programs take them."""
    kinds: dict[type, Callable[[Any], Any]] = {
        GatedDeltaNetConfig: to_json,
        AttentionConfig: _attention,
    }
    if type(config) not in kinds:
        raise ValueError(f"a layer with {config.label}, which the programs for PyTorch lack.")
    return kinds[type(config)](config)


def _attention(config: AttentionConfig) -> dict[str, Any]:
    """Its settings with the rotary frequencies, radians per token of each pair."""
    if not config.rotary_dim:
        return to_json(config) | {"frequencies": [], "rotary_scale": 1.0}
    scaling = config.yarn or config.llama3 or config.linear_scaling
    turns = rotary_frequencies(config.rotary_dim, theta=config.rope_theta, scaling=scaling)
    return to_json(config) | {
        "frequencies": turns.frequencies.tolist(),
        "rotary_scale": turns.scale,
    }


def hybrid_parts(arrays: Mapping[str, Any]) -> Parts:
    """The tensors of a hybrid's arrays but those of memories: names with dots, maps transposed."""
    made: Parts = {}
    for name, array in arrays.items():
        if not name.startswith("params/") or "/memory/" in name:
            continue
        theirs = name.removeprefix("params/").replace("/", ".")
        if theirs.endswith(".kernel"):
            theirs = theirs.removesuffix("kernel") + "weight"
            made[name] = matrix(theirs, *array.shape)
        else:
            made[name] = vector(theirs, array.shape)
    return made
