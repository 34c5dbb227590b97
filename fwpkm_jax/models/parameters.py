"""How many numbers a model holds, and how many of them one token uses."""

from typing import NamedTuple

import jax
from flax import nnx

from fwpkm_jax.models.language_model import LanguageModel, ModelConfig


class ParameterCount(NamedTuple):
    """Numbers of a model, fast weights included.

    Attributes:
      total: all of them.
      active: without the slots that one token does not read.
    """

    total: int
    active: int


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Counts without allocating anything.

    The paper's convention: fast weights count like parameters, one memory per layer; of a memory's
    value table, only the heads * top_k slots that a token reads are active, of experts those that a
    token is sent to.

    References: Zhao and Jones 2026, arXiv:2601.00671, Table 1.
    """

    def build():
        model = LanguageModel(config, rngs=nnx.Rngs(0))
        return nnx.state(model), model.init_memory(jax.random.key(0))

    total = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(build)))
    rule, pkm = config.fast_weight.rule, config.pkm
    idle = len(config.memory_layers) * rule.idle_size
    idle += (
        len(config.pkm_layers) * pkm.value_dim * (pkm.num_subkeys**2 - pkm.num_heads * pkm.top_k)
    )
    experts = config.experts
    of_expert = 3 * config.model_dim * experts.hidden_dim
    idle += len(config.expert_layers) * (experts.num_experts - experts.top_k) * of_expert
    return ParameterCount(total, total - idle)
