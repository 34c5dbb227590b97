"""How a decoder is made: its blocks, the scale of their branches and the dtype of their weights."""

import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fwpkm_jax.layers.experts import Experts
from fwpkm_jax.layers.memories.fast_weight import FastWeight
from fwpkm_jax.layers.mlp import SwiGLU
from fwpkm_jax.layers.parameters import MATRICES, Role
from fwpkm_jax.layers.pkm import PKM
from fwpkm_jax.models.block import Block
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.sharding import declarations


def build_blocks(config: ModelConfig, *, dtype: Any, rngs: nnx.Rngs) -> list[Any]:
    """The decoder's blocks in order, with their initial weights.

    Args:
      dtype: of the activations; None follows the input.
    """
    dim = config.model_dim
    shared: dict[str, Any] = {"norm_eps": config.norm_eps, "init_std": config.init_std}
    shared |= {"dtype": dtype, "rngs": rngs}
    blocks = []
    for index, mixer_config in enumerate(config.mixer_configs):
        mixer = mixer_config.build(dim, **shared)
        if index in config.pkm_layers:
            feed_forward = PKM(config.pkm, dim, dtype=dtype, rngs=rngs)
        elif index in config.expert_layers:
            feed_forward = Experts(
                config.experts,
                dim,
                init_std=config.init_std,
                activation=config.mlp_activation,
                dtype=dtype,
                rngs=rngs,
            )
        else:
            feed_forward = SwiGLU(
                dim,
                config.mlp_dim,
                init_std=config.init_std,
                activation=config.mlp_activation,
                bias=config.mlp_bias,
                dtype=dtype,
                rngs=rngs,
            )
        memory = memory_mixer = None
        if index in config.memory_layers:
            memory = FastWeight(config.fast_weight, dim, **shared)
            if config.memory_mixer is not None:
                memory_mixer = config.memory_mixer.build(dim, **shared)
        block = Block(
            mixer,
            feed_forward,
            memory,
            dim,
            memory_mixer=memory_mixer,
            path=f"blocks/{index}",
            norm_eps=config.norm_eps,
            norm_offset=config.norm_offset,
            norms=config.norms_of(index),
        )
        blocks.append(block)
    return blocks


def scale_branches(block: Block, scale: float) -> None:
    """Scales the linear maps that write into the residual stream."""
    feed_forward = block.feed_forward
    output = block.mixer.output_map
    outputs = [] if output is None else [output]
    if isinstance(feed_forward, Experts):
        feed_forward.down_kernel[...] = feed_forward.down_kernel[...] * scale
        feed_forward = feed_forward.shared
    if feed_forward is not None:
        is_pkm = isinstance(feed_forward, PKM)
        outputs.append(feed_forward.out_proj if is_pkm else feed_forward.down_proj)
    if block.memory is not None:
        outputs.append(block.memory.out_proj)
    for linear in outputs:
        linear.kernel[...] = linear.kernel[...] * scale


def store_matrices(model: nnx.Module, dtype: Any) -> None:
    """Casts the parameters that `ModelConfig.parameter_dtype` applies to."""

    params = nnx.state(model, nnx.Param)
    leaves, structure = jax.tree.flatten(params)

    def stored(name: str, role: Role) -> Any:
        of_memory = re.fullmatch(r"fast_weight_layer/.*|blocks/\d+/memory(_mixer\w*)?/.*", name)
        return jnp.float32 if of_memory or role not in MATRICES else dtype

    names = declarations(params).items()
    cast = [x.astype(stored(name, of.role)) for (name, of), x in zip(names, leaves, strict=True)]
    nnx.update(model, jax.tree.unflatten(structure, cast))
