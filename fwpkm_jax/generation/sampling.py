"""Chooses the next token from its logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from fwpkm_jax.literals import Count, NotNegative, ShareAboveZero, check_fields


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen, and which ones end; the default takes the most likely one.

    The temperature is applied first, then `top_k`, then `top_p` to the remaining tokens.

    Example:
      >>> from fwpkm_jax import Sampling
      >>> Sampling(temperature=0.8, top_p=0.95).top_p
      0.95
    """

    temperature: NotNegative = 0.0
    """Divides the logits before a token is drawn; 0 takes the most likely one."""
    top_k: Count | None = None
    """Draws among the `top_k` most likely tokens; None: all."""
    top_p: ShareAboveZero | None = None
    """Draws among the smallest set of most likely tokens whose total probability reaches `top_p`
    (Holtzman et al. 2020, arXiv:1904.09751); None: all."""
    vocab_size: Count | None = None
    """Only ids below this number may be chosen, for models whose embedding table is larger than the
    tokenizer's vocabulary; None: all."""
    stop_ids: Sequence[int] = ()
    """Tokens that end a sequence, such as the end of a document. They are read too."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_ids", tuple(int(token) for token in self.stop_ids))
        check_fields(self)
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError(
                f"top_k={self.top_k} and top_p={self.top_p} have no effect at temperature=0, which "
                "takes the most likely token; set a temperature, 1 for the model's own."
            )


def check_stop_ids(sampling: Sampling, vocab_size: int) -> None:
    """Raises a ValueError unless all of its `stop_ids` are tokens."""
    if any(not 0 <= token < vocab_size for token in sampling.stop_ids):
        raise ValueError(f"stop_ids={sampling.stop_ids} must lie between 0 and {vocab_size - 1}.")


def choose_tokens(
    logits: Float[Array, "batch vocab"], rngs: Key[Array, " batch"], sampling: Sampling
) -> Int[Array, " batch"]:
    """One token id for each row of logits, int32 `[batch]`; each row has its own random key.

    Raises:
      ValueError: `sampling.vocab_size` exceeds the number of logits.
    """
    if sampling.vocab_size is not None:
        if sampling.vocab_size > logits.shape[1]:
            raise ValueError(
                f"vocab_size={sampling.vocab_size} exceeds the model's {logits.shape[1]} tokens."
            )
        logits = logits[:, : sampling.vocab_size]
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # The largest is 0, so that no temperature overflows; as it goes to 0 the draw becomes greedy.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    logits = jnp.where(logits == 0, 0, logits / sampling.temperature)
    if sampling.top_k is None and sampling.top_p is None:
        return jax.vmap(jax.random.categorical)(rngs, logits).astype(jnp.int32)
    # A stable sort breaks ties by id, so that top_k never keeps more than k tokens.
    order = jnp.argsort(-logits, axis=-1, stable=True)
    logits = jnp.take_along_axis(logits, order, axis=-1)
    if sampling.top_k is not None:
        beyond = jnp.arange(logits.shape[1], dtype=jnp.int32) >= sampling.top_k
        logits = jnp.where(beyond[None], -jnp.inf, logits)
    if sampling.top_p is not None:
        probabilities = jax.nn.softmax(logits, axis=-1)
        # Keeps a token if the more likely ones do not reach top_p; always keeps the first.
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        logits = jnp.where(before < sampling.top_p, logits, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(rngs, logits)
    return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)
