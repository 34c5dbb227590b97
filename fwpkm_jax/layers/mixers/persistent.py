"""Persistent memory: learned tokens that a mixer reads before every sequence."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fwpkm_jax.core.checks import check_rngs
from fwpkm_jax.core.sequence.axis import SequenceAxis
from fwpkm_jax.layers.mixers.base import AbstractMixer, Mask, ReadBefore, Starts
from fwpkm_jax.layers.parameters import parameter


class PersistentTokens(AbstractMixer):
    """A token mixer that has read the same learned tokens before each document's first.

    It takes rows of several documents around a mixer whose `mix` has an argument `before`, a
    `ReadBefore`: the state in which each document begins. Other mixers would have to read the
    tokens between the documents, so rows of several documents are refused there.

    References: Behrouz et al. 2025, arXiv:2501.00663, section 3.3.
    """

    def __init__(self, mixer: AbstractMixer, number: int, model_dim: int, *, rngs: nnx.Rngs):
        """Args: `mixer` of width `model_dim`."""
        check_rngs(rngs)
        self.mixer = mixer
        # Unit variance, like the normed input of a mixer.
        tokens = nnx.initializers.normal(1.0)(rngs.params(), (number, model_dim), jnp.float32)
        self.tokens = parameter(tokens, "embedding", (None, "embed"))

    def init_cache(self, batch: int, *, max_length: int, dtype: DTypeLike) -> Any:
        """The mixer's cache after it has read the tokens; see its own `init_cache`."""
        max_length += self.tokens.shape[0]
        # One sequence reads them for all: they are the same everywhere.
        cache = self.mixer.init_cache(1, max_length=max_length, dtype=dtype)
        _, cache = self.mixer(self.tokens[...][None].astype(dtype), cache=cache)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), cache)

    def capacity(self, cache: Any) -> int | None:
        capacity = self.mixer.capacity(cache)
        # Callers count their own tokens; the learned ones take room beside them.
        return None if capacity is None else capacity - self.tokens.shape[0]

    def grow_cache(self, cache: Any, max_length: int) -> Any:
        return self.mixer.grow_cache(cache, max_length + self.tokens.shape[0])

    @property
    def output_map(self) -> nnx.Linear | None:
        return self.mixer.output_map

    @property
    def takes_documents(self) -> bool:
        return "before" in inspect.signature(self.mixer.mix).parameters

    def mix(
        self,
        x: Float[Array, "batch length model"],
        *,
        mask: Mask = None,
        starts: Starts = None,
        cache: Any = None,
        axis: SequenceAxis | None = None,
    ) -> tuple[Float[Array, "batch length model"], Any]:
        if axis is not None and starts is not None:
            return self.mix_in_turn(x, axis=axis, cache=cache, mask=mask, starts=starts)
        if starts is not None:
            if cache is None:
                # A whole row begins with a document, and needs no room for later calls.
                starts, room = starts.at[:, 0].set(True), 0
            else:
                room = self.capacity(cache) or 0
            fresh = self.init_cache(x.shape[0], max_length=room, dtype=x.dtype)
            options: Any = {"starts": starts, "before": ReadBefore(fresh, self.tokens.shape[0])}
            return self.mixer.mix(x, mask=mask, cache=cache, **options)
        if cache is not None or axis is not None:
            before = cache
            if before is None:
                before = self.init_cache(x.shape[0], max_length=x.shape[1], dtype=x.dtype)
            y, after = self.mixer.mix_shard(x, axis=axis, cache=before, mask=mask)
            return y, None if cache is None else after
        tokens = self.tokens[...].astype(x.dtype)
        tokens = jnp.broadcast_to(tokens, (x.shape[0], *tokens.shape))
        if mask is not None:
            mask = jnp.concatenate([jnp.ones_like(mask, shape=tokens.shape[:2]), mask], axis=1)
        y, _ = self.mixer(jnp.concatenate([tokens, x], axis=1), mask=mask)
        return y[:, tokens.shape[1] :], None
