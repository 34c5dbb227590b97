"""Converts checkpoints of the authors' release to weights of this package, and back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fwpkm_jax.interchange.weights import (
    Weights,
    abstract_weights,
    check_finite,
    checked,
    refuse_other_names,
)
from fwpkm_jax.io.status_line import watched
from fwpkm_jax.io.untrusted import OutsideFileError
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.paper.release.layouts import read_checkpoint
from fwpkm_jax.paper.release.names import Names, release_names, shape_there, to_ours, to_theirs


def from_release(
    tensors: Mapping[str, Any],
    config: ModelConfig,
    *,
    where: str | Path = "The checkpoint",
    dtype: Any = None,
) -> Weights:
    """Converts the release's tensors to a model's weights with one memory per layer.

    The function is differentiable: gradients have the release's names.

    Args:
      where: what messages call the tensors' place.
      dtype: of all weights; None: their own.

    Raises:
      ValueError: a tensor is missing, unknown, of another shape or not finite; or the release has
        no such model.
    """
    names = release_names(config)
    like = abstract_weights(config)
    # Without the axis of memories.
    shapes = {p: x.shape[1:] if _is_fast(p) else x.shape for p, x in like.named().items()}
    arrays = converted(tensors, names, shapes, where=where, dtype=dtype)
    return like.replaced({path: x[None] if _is_fast(path) else x for path, x in arrays.items()})


def converted(
    tensors: Mapping[str, Any],
    names: Names,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    where: str | Path,
    dtype: Any = None,
) -> dict[str, Any]:
    """The arrays of `from_release` by their paths in the model, in a dtype or their own."""
    needed = {t.name: None for t in names.values() if not t.optional or t.name in tensors}
    refuse_other_names(tensors, needed, where)
    arrays = {}
    for path, (name, layout, _) in watched(names.items(), "arrays converted"):
        shape = shapes[path]
        if name in tensors:
            tensor = checked(name, tensors[name], shape_there(shape, layout), where)
            if dtype is not None and tensor.dtype != dtype:
                with np.errstate(over="ignore"):
                    tensor = np.asarray(tensor).astype(dtype)
                check_finite(name, tensor, where)  # It may be too large for the dtype.
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
    """Reads a checkpoint of the release as float32.

    Args:
      path: a file or a folder in one of the layouts of `layouts`.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file has another format or holds something other than tensors; see also
        `from_release`.
    """
    path = Path(path)
    tensors = read_checkpoint(path)
    if config.tie_embeddings and "lm_head.weight" in tensors:
        head = tensors.pop("lm_head.weight")
        embedding = tensors.get("model.embed_tokens.weight")
        same = embedding is None or head.shape == embedding.shape
        if not same or (embedding is not None and not np.array_equal(head, embedding)):
            raise OutsideFileError(
                path,
                "holds an lm_head.weight that differs from the embedding",
                otherwise="the configuration needs model.tie_embeddings=False",
            )
    return from_release(tensors, config, where=path, dtype=np.float32)


def _is_fast(path: str) -> bool:
    return path.startswith("memory/")
