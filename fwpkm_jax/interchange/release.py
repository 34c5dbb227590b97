"""Converts checkpoints of the authors' release to weights of this package, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from fwpkm_jax.interchange.release_names import (
    Names,
    release_names,
    shape_there,
    to_ours,
    to_theirs,
)
from fwpkm_jax.interchange.torch_file import read_torch_file
from fwpkm_jax.interchange.weights import Weights, abstract_weights, checked, refuse_other_names
from fwpkm_jax.models.config import ModelConfig


def from_release(tensors: Mapping[str, Any], config: ModelConfig) -> Weights:
    """Converts the release's tensors to a model's weights with one memory per layer.

    Dtypes do not change. The function is differentiable: gradients have the release's names.

    Args:
      tensors: arrays by the release's names.
      config: the model to which they belong.

    Raises:
      ValueError: a tensor is missing, unknown or of another shape; or the release has no such
        model.
    """
    names = release_names(config)
    like = abstract_weights(config)
    arrays = converted(tensors, names, _shapes(like), where="The checkpoint")
    return like.replaced({path: x[None] if _is_fast(path) else x for path, x in arrays.items()})


def converted(
    tensors: Mapping[str, Any], names: Names, shapes: Mapping[str, tuple[int, ...]], *, where: str
) -> dict[str, Any]:
    """The arrays of `from_release` by their paths in the model."""
    needed = {t.name: None for t in names.values() if not t.optional or t.name in tensors}
    refuse_other_names(tensors, needed, where)
    arrays = {}
    for path, (name, layout, _) in names.items():
        shape = shapes[path]
        if name in tensors:
            tensor = checked(name, tensors[name], shape_there(shape, layout))
            arrays[path] = to_ours(tensor, shape, layout)
        else:
            arrays[path] = jnp.zeros(shape)
    return arrays


def to_release(weights: Weights, config: ModelConfig) -> dict[str, Any]:
    """Converts weights to the release's names and shapes; the inverse of `from_release`.

    Raises:
      ValueError: a layer has several memories, or the release has no such model.
    """
    tensors = {}
    named = weights.named()
    for path, (name, layout, _) in release_names(config).items():
        array = named[path]
        if _is_fast(path):
            if array.shape[0] != 1:
                raise ValueError(
                    f"{path} holds {array.shape[0]} memories; the release has one per layer: "
                    "choose one of them."
                )
            array = array[0]
        tensors[name] = to_theirs(array, layout)
    return tensors


def read_release(path: str | Path, config: ModelConfig) -> Weights:
    """Reads a checkpoint of the release, `.safetensors` or written by `torch.save`, as float32.

    DeepSpeed writes the model under an entry `module` beside others; then that entry is read.

    Args:
      path: the file.
      config: the model that was trained.

    Raises:
      ValueError: the file has another format or holds something other than tensors; see also
        `from_release`.
    """
    path = Path(path)
    tensors: Any = load_file(path) if path.suffix == ".safetensors" else read_torch_file(path)
    tensors = tensors.get("module", tensors)
    strangers = [name for name, x in tensors.items() if not isinstance(x, np.ndarray)]
    if strangers:
        raise ValueError(f"{path}: {strangers[0]!r} is not a tensor; save the model's state_dict.")
    tensors = {name: np.asarray(x, np.float32) for name, x in tensors.items()}
    if config.tie_embeddings and "lm_head.weight" in tensors:
        head = tensors.pop("lm_head.weight")
        if not np.array_equal(head, tensors.get("model.embed_tokens.weight")):
            raise ValueError(
                f"{path}: lm_head.weight differs from the embedding; the configuration needs "
                "model.tie_embeddings=False."
            )
    return from_release(tensors, config)


def _shapes(like: Weights) -> dict[str, tuple[int, ...]]:
    """The array without its axis of memories."""
    return {path: x.shape[1:] if _is_fast(path) else x.shape for path, x in like.named().items()}


def _is_fast(path: str) -> bool:
    return path.startswith("memory/")
