"""Small models with memories as folders for PyTorch, and what this package computes with them."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax import FastWeightConfig, FwPKM, load_config
from fwpkm_jax.interchange import start_run
from fwpkm_jax.interchange.hf import export_model, model_config
from fwpkm_jax.interchange.weights import Weights, abstract_weights
from fwpkm_jax.layers import AttentionConfig, GatedDeltaNetConfig, YarnConfig
from fwpkm_jax.layers.pkm import PKMConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel
from tests.interchange.make_families import DATA, drawn
from tests.interchange.test_hf_commands import OTHERS, OURS

VOCAB, LENGTH = 32, 300
MEMORY = FastWeightConfig(
    rule=FwPKM(num_subkeys=8, key_dim=8, value_dim=12, num_heads=2, top_k=3), chunk_size=16
)
_HYBRID = ModelConfig(
    vocab_size=VOCAB, model_dim=24, mlp_dim=32, mixers=("gdn", "swa", "attention", "gdn"),
    memory_layers=(1, 3), pkm_layers=(2,), window=20, fast_weight=MEMORY,
    activation_dtype="float32",
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rotary_fraction=0.5),
    gdn=GatedDeltaNetConfig(
        num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=8
    ),
    pkm=PKMConfig(num_subkeys=6, key_dim=8, value_dim=10, num_heads=2, top_k=3),
)  # fmt: skip
HYBRIDS = {
    "hybrid": _HYBRID,
    "hybrid_other": dataclasses.replace(
        _HYBRID, tie_embeddings=False, norm_offset=False, mlp_bias=True, mlp_activation="gelu_tanh",
        embedding_scale=2.0, pkm=dataclasses.replace(_HYBRID.pkm, gated=False, query_norm=False),
        attention=AttentionConfig(
            num_heads=2, num_kv_heads=2, head_dim=12, gated=False, qk_norm="all", bias=True,
            rotary_fraction=1.0, score_dim=9, yarn=YarnConfig(factor=4.0, original_length=64),
        ),
        gdn=dataclasses.replace(_HYBRID.gdn, max_strength=2.0, conv_width=3),
        fast_weight=dataclasses.replace(
            MEMORY, query_norm="l2", value_norm="none", gate_output=False, gate_residual=True,
            full_read=0.3,
            rule=dataclasses.replace(
                MEMORY.rule, score="dot", lookahead=2, temperature=0.7, learning_rate=0.5,
                addressing_weight=2.0, value_step=3.0,
            ),
        ),
    ),
}  # fmt: skip
"""The paper's kind, and one with every other option that the programs read."""


FAMILY_MODELS = {"qwen3_5": OURS, **{x: OTHERS[x] for x in ("llama", "qwen3", "olmo_hybrid")}}
"""Families that `make_families` lacks, or whose model another family computes, too."""


def family_model(name: str) -> ModelConfig:
    """A small model of a family, with a memory before its last layer."""
    if name in FAMILY_MODELS:
        return with_memory(FAMILY_MODELS[name])
    known = json.loads((DATA / "families.json").read_text())["models"][name]["config"]
    known = {**known, "max_position_embeddings": LENGTH + 32}
    return with_memory(model_config(known))


def with_memory(model: ModelConfig) -> ModelConfig:
    return dataclasses.replace(
        model,
        memory_layers=(len(model.mixers) - 1,),
        fast_weight=MEMORY,
        activation_dtype="float32",
    )


def export(model: ModelConfig, folder: Path) -> Weights:
    """Makes a run of drawn weights at FOLDER/run and exports it to FOLDER/out; its weights."""
    like = abstract_weights(model)
    memory = jax.vmap(lambda rng: model.fast_weight.rule.init(rng))(
        jax.random.split(jax.random.key(0), 1)
    )
    arrays = {name: drawn(name, x.shape).astype(x.dtype) for name, x in like.named().items()}
    weights = like.replaced(arrays)._replace(memory={name: memory for name in like.memory})
    experiment = dataclasses.replace(
        load_config("books_tiny"), model=model, run_dir=str(folder / "run")
    )
    start_run(experiment, weights)
    export_model(folder / "run", folder / "out", say=lambda _: None)
    return weights


@contextlib.contextmanager
def loading_in_pytorch(place: Path) -> Iterator[Callable[..., Any]]:
    """What loads a folder as its card says; its programs go into `place` while this lasts."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)

    def loaded(folder, **options):
        options = {"dtype": torch.float32, **options}
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(place))
        # Programs that another test has loaded lie in another place.
        others = [path for path in sys.path if not Path(path, "transformers_modules").exists()]
        patch.setattr(sys, "path", others)
        for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
            patch.delitem(sys.modules, name)
        yield loaded


def streamed(model: ModelConfig, weights: Weights, tokens, mask, *, groups: int, wide=False):
    """Logits `[batch, length, vocab]` and the stream after the tokens, in one piece.

    Args:
      model: the model.
      weights: its weights, float32.
      tokens: ids `[batch, length]`.
      mask: 0 for padding.
      groups: memories.
      wide: whether all is computed in float64.
    """
    batch, length = tokens.shape

    def lm():
        return LanguageModel(model, rngs=nnx.Rngs(0), dtype=None)

    @jax.jit
    def run(weights, tokens, mask):
        lm = nnx.merge(graphdef, weights.params)
        memory = jax.tree.map(lambda x: jnp.repeat(x, groups, axis=0), weights.memory)
        stream = lm.init_stream(memory, batch=batch, max_length=length)
        out = lm.stream(tokens, stream, mask=mask)
        return out.logits, out.stream

    with jax.enable_x64(wide), jax.default_matmul_precision("highest"):
        graphdef = nnx.split(nnx.eval_shape(lm))[0]
        if wide:
            weights = jax.tree.map(lambda x: np.asarray(x, np.float64), weights)
        return jax.tree.map(np.asarray, run(weights, jnp.asarray(tokens), jnp.asarray(mask)))
