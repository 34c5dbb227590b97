"""Linear attention: the vanilla fast-weight programmer."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from fwpkm_jax.rules.matrix.base import Form, State, Tokens
from fwpkm_jax.rules.matrix.features import POSITIVE
from fwpkm_jax.rules.matrix.normalizer import divided, with_one
from fwpkm_jax.rules.matrix.recurrence import AbstractRecurrenceRule


@dataclass(frozen=True, kw_only=True)
class LinearAttention(AbstractRecurrenceRule):
    """Adds every value under its key; with `normalized`, reads their weighted mean.

    References: Schmidhuber 1992; Katharopoulos et al. 2020, arXiv:2006.16236.
    """

    form: ClassVar[Form] = Form(
        name="linear attention",
        right="$I$",
        written=r"$vk^\top$",
        read=r"$Wq$, or $Wq / (z^\top q)$ with $z = \sum k$",
        loss=r"$-v^\top Wk$",
        source="arXiv:2006.16236",
    )
    normalized: bool = False
    """Divides what is read by the sum of its weights; needs features that are never negative."""

    def __post_init__(self):
        super().__post_init__()
        if self.normalized and self.feature_map not in POSITIVE:
            raise ValueError(
                f"feature_map={self.feature_map!r} with normalized=True would divide by sums of "
                f"either sign; choose one of {list(POSITIVE)}."
            )

    @classmethod
    def variants(cls) -> "tuple[LinearAttention, ...]":
        return cls(), cls(normalized=True, feature_map="elu")

    def init(self, batch: int, heads: int, key: int, value: int, *, dtype: DTypeLike) -> State:
        # One more column sums the keys, for the normaliser.
        return jnp.zeros((batch, heads, key, value + self.normalized), dtype)

    def read_out(self, product: Array) -> Array:
        return divided(product) if self.normalized else product

    def recurrence_inputs(self, tokens: Tokens) -> Tokens:
        return tokens._replace(value=with_one(tokens.value)) if self.normalized else tokens
