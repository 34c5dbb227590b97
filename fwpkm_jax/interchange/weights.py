"""A model's slow and fast weights, and their names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from fwpkm_jax.io.untrusted import OutsideFileError, shown
from fwpkm_jax.literals import some
from fwpkm_jax.models.language_model import LanguageModel, ModelConfig
from fwpkm_jax.training.state import Memories, named_leaves

_OTHER_CONFIG = "choose the configuration that it was trained with"
_BLOCK = 2**20


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

    def replaced(self, arrays: Mapping[str, Any]) -> "Weights":
        """Weights of the same structure with other arrays, which have the names of `named`."""
        return jax.tree.unflatten(jax.tree.structure(self), [arrays[name] for name in self.named()])


def abstract_weights(config: ModelConfig, *, groups: int = 1) -> Weights:
    """Shapes and dtypes of a model's weights; allocates no arrays."""

    def build() -> Weights:
        model = LanguageModel(config, rngs=nnx.Rngs(0))
        return Weights(nnx.state(model), model.init_memory(jax.random.key(0), groups=groups))

    return jax.eval_shape(build)


def refuse_other_names(
    found: Mapping[str, Any], expected: Mapping[str, Any], where: str | Path
) -> None:
    """Raises an OutsideFileError that lists missing and surplus tensors."""
    faults = {
        "lacks": [name for name in expected if name not in found],
        "holds, without a place in the model,": [name for name in found if name not in expected],
    }
    problems = [
        f"{what} {some([shown(name, 100) for name in names])}"
        for what, names in faults.items()
        if names
    ]
    if problems:
        raise OutsideFileError(where, " and ".join(problems), otherwise=_OTHER_CONFIG)


def checked(name: str, tensor: Any, shape: tuple[int, ...], where: str | Path) -> Any:
    """Returns a tensor from outside if it has the model's shape and its numbers are finite.

    Of a tensor that is traced the numbers are not known, and not checked.

    Raises:
      OutsideFileError: it has another shape, holds other things than floating-point numbers, or
        NaN or infinity.
    """
    check_shape(name, tensor.shape, shape, where)
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        problem = f"holds {tensor.dtype}, and weights are floating-point numbers"
        raise OutsideFileError(
            where, problem, f"tensor {name!r}", "import the model it was made from"
        )
    if not isinstance(tensor, Tracer):
        check_finite(name, tensor, where)
    return tensor


def check_shape(name: str, found: Sequence[int], shape: Sequence[int], where: str | Path) -> None:
    """Raises an OutsideFileError if a tensor has another shape than the model needs."""
    if tuple(found) != tuple(shape):
        problem = f"has the shape {list(found)}; the model's is {list(shape)}"
        raise OutsideFileError(where, problem, f"tensor {name!r}", _OTHER_CONFIG)


def check_finite(name: str, tensor: Any, where: str | Path) -> None:
    """Raises an OutsideFileError if a floating-point array holds NaN or infinity."""
    bad = _num_not_finite(np.asarray(tensor))
    if bad:
        raise OutsideFileError(
            where,
            f"holds NaN or infinity in {bad:,} of {tensor.size:,} numbers",
            f"tensor {name!r}",
            "fetch it again, or take weights from before they became so",
        )


def _num_not_finite(array: np.ndarray) -> int:
    """The number of entries that are NaN or infinite; needs little memory beside the array."""
    flat = np.ravel(array, order="K")
    blocks = (flat[first : first + _BLOCK] for first in range(0, flat.size, _BLOCK))
    return flat.size - sum(int(np.count_nonzero(np.isfinite(block))) for block in blocks)
