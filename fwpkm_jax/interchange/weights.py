"""A model's slow and fast weights, and their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from fwpkm_jax.models.language_model import LanguageModel, ModelConfig
from fwpkm_jax.training.state import Memories, named_leaves


class Weights(NamedTuple):
    """All weights of a model.

    Attributes:
      params: slow weights, an `nnx.State`.
      memory: fast weights by layer name; each leaf is `[groups, ...]`.
    """

    params: Any
    memory: Memories

    def named(self) -> dict[str, Any]:
        """The arrays by name: `params/blocks/0/mixer/q_proj/kernel`, `memory/layer_2/keys`."""
        return {
            f"{part}/{name}": leaf
            for part, tree in self._asdict().items()
            for name, leaf in named_leaves(tree).items()
        }

    def replaced(self, arrays: Mapping[str, Any]) -> Weights:
        """Weights of the same structure with other arrays, which have the names of `named`."""
        return jax.tree.unflatten(jax.tree.structure(self), [arrays[name] for name in self.named()])


def abstract_weights(config: ModelConfig, *, groups: int = 1) -> Weights:
    """Shapes and dtypes of a model's weights; allocates no arrays."""

    def build() -> Weights:
        model = LanguageModel(config, rngs=nnx.Rngs(0))
        return Weights(nnx.state(model), model.init_memory(jax.random.key(0), groups=groups))

    return jax.eval_shape(build)


def refuse_other_names(found: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    """Raises a ValueError that lists missing and surplus tensors."""
    faults = {
        "lacks": [name for name in expected if name not in found],
        "holds, without a place in the model,": [name for name in found if name not in expected],
    }
    lines = [f"{where} {what} {_listed(names)}." for what, names in faults.items() if names]
    if lines:
        raise ValueError(" ".join(lines) + " Choose the configuration that it was trained with.")


def _listed(names: list[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def checked(name: str, tensor: Any, shape: tuple[int, ...]) -> Any:
    """Returns the tensor if it has the shape that the model needs.

    Raises:
      ValueError: it has another shape; the message names both.
    """
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{name} has the shape {tuple(tensor.shape)}; the model's is {tuple(shape)}. "
            "Choose the configuration that it was trained with."
        )
    return tensor
