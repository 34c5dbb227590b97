"""Running statistics of batch norms: stored with the weights, updated by the training step."""

import re
from typing import Any

import jax
from jaxtyping import Array, Float

from fwpkm_jax.layers.pkm import QueryStatistics
from fwpkm_jax.models.outputs import layer_name
from fwpkm_jax.models.sharding import path_name

_SHARE = 0.1  # Weight of the newest batch.


def with_statistics(params: Any, statistics: dict[str, QueryStatistics]) -> Any:
    """The weights with running statistics moved a tenth of the way to those of a batch.

    Args:
      params: slow weights of a `LanguageModel`.
      statistics: `Hidden.pkm_statistics`, by layer name; if empty, the weights stay unchanged.

    References: Ioffe and Szegedy 2015, arXiv:1502.03167.
    """
    if not statistics:
        return params

    def moved(path: Any, weight: Float[Array, "..."]) -> Float[Array, "..."]:
        found = re.fullmatch(r"blocks/(\d+)/feed_forward/query_(mean|variance)", path_name(path))
        if found is None:
            return weight
        new = getattr(statistics[layer_name(int(found[1]))], found[2])
        return weight + _SHARE * (new - weight)

    return jax.tree_util.tree_map_with_path(moved, params)
