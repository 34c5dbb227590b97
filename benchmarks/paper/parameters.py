"""The number of parameters of a model, in total and active per token."""

from typing import NamedTuple

import jax
from flax import nnx

from fwpkm_jax.models.language_model import LanguageModel, ModelConfig


class ParameterCount(NamedTuple):
    """Parameter counts of a model, fast weights included.

    Attributes:
      total: all parameters.
      active: without the slots and experts that one token does not use.
    """

    total: int
    active: int


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Counts a model's parameters without allocating arrays.

    Follows the paper: fast weights count like parameters, one memory per layer. Of a memory's value
    table only the `heads * top_k` slots that a token reads are active. Of the experts only those
    that a token is sent to are active.

    References: Zhao and Jones 2026, arXiv:2601.00671, Table 1.
    """

    def build():
        model = LanguageModel(config, rngs=nnx.Rngs(0))
        return nnx.state(model), model.init_memory(jax.random.key(0))

    total = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(build)))
    rule, pkm = config.fast_weight.rule, config.pkm
    idle = len(config.memory_layers) * rule.inactive_parameters
    idle += (
        len(config.pkm_layers) * pkm.value_dim * (pkm.num_subkeys**2 - pkm.num_heads * pkm.top_k)
    )
    experts = config.experts
    of_expert = 3 * config.model_dim * experts.hidden_dim
    idle += len(config.expert_layers) * (experts.num_experts - experts.top_k) * of_expert
    return ParameterCount(total, total - idle)
