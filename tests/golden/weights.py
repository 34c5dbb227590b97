"""The release's parameters by name, put into this package's modules by the importer's tables.

Assignments are traced, so that gradients come back under the release's names.
"""

import jax
from flax import nnx

from fwpkm_jax.layers.memories.fast_weight import FastWeight
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.paper.release.conversion import converted, from_release
from fwpkm_jax.paper.release.names import (
    FWMLP_MEMORY,
    FWPKM_MEMORY,
    Names,
    memory_block_names,
    to_theirs,
)
from fwpkm_jax.rules import FwMLPMemory, FwPKM, FwPKMMemory
from fwpkm_jax.training.state import named_leaves

Weights = dict[str, jax.Array]
MEMORIES = {FwPKMMemory: FWPKM_MEMORY, FwMLPMemory: FWMLP_MEMORY}


def filled(module: nnx.Module, weights: Weights, names: Names) -> nnx.Module:
    """A copy of the module with the release's parameters, all of which must have a place."""
    graph, state = nnx.split(module)
    return nnx.merge(graph, _replaced(state, weights, names))


def _replaced(tree, weights: Weights, names: Names):
    shapes = {path: x.shape for path, x in named_leaves(tree).items()}
    names = {path: names[path] for path in shapes}
    arrays = converted(weights, names, shapes, where="The file")
    return jax.tree.unflatten(jax.tree.structure(tree), [arrays[path] for path in shapes])


def filled_fast_weight(
    layer: FastWeight, weights: Weights
) -> tuple[FastWeight, FwPKMMemory | FwMLPMemory]:
    """A copy of a memory block with the release's parameters; its fast weights, as one group."""
    prefix = "fwpkm."
    fast = {n.removeprefix(prefix): x for n, x in weights.items() if n.startswith(prefix)}
    slow = {n: x for n, x in weights.items() if not n.startswith(prefix)}
    gated = layer.config.gate_output or layer.config.weight_by_gate
    memory = jax.tree.map(lambda x: x[None], memory_of(layer.config.rule, fast))
    return filled(layer, slow, memory_block_names(gated=gated)), memory


def memory_of(rule, weights: Weights) -> FwPKMMemory | FwMLPMemory:
    """One memory from the release's tensors."""
    like = jax.eval_shape(rule.init, jax.random.key(0))
    return _replaced(like, weights, FWPKM_MEMORY if isinstance(rule, FwPKM) else FWMLP_MEMORY)


def release_weights(memory: FwPKMMemory | FwMLPMemory) -> Weights:
    """One memory under the release's names and in its shapes."""
    names = MEMORIES[type(memory)]
    return {
        names[path].name: to_theirs(x, names[path].layout)
        for path, x in named_leaves(memory).items()
    }


def filled_language_model(
    model: LanguageModel, weights: Weights
) -> tuple[LanguageModel, dict[str, FwPKMMemory | FwMLPMemory]]:
    """A copy of the model with the release's parameters; its fast weights by layer name."""
    params, memory = from_release(weights, model.config)
    return nnx.merge(nnx.graphdef(model), params), memory
