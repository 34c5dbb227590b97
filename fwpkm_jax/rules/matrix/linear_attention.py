"""Linear attention: the vanilla fast-weight programmer."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax.typing import DTypeLike

from fwpkm_jax.core.recurrence.linear_recurrence import RecurrenceOutput
from fwpkm_jax.rules.matrix.base import (
    AbstractMatrixRule,
    Form,
    LocalLoss,
    Starts,
    State,
    Tokens,
    agreement,
)
from fwpkm_jax.rules.matrix.features import POSITIVE
from fwpkm_jax.rules.matrix.normalizer import divided, with_one


@dataclass(frozen=True, kw_only=True)
class LinearAttention(AbstractMatrixRule):
    """Adds every value under its key; with `normalized`, reads their weighted mean.

    References: Schmidhuber 1992; Katharopoulos et al. 2020, arXiv:2006.16236.
    """

    form: ClassVar[Form] = Form(
        name="linear attention",
        left="$I$",
        right="$I$",
        written=r"$vk^\top$",
        read=r"$Wq$, or $Wq / (z^\top q)$ with $z = \sum k$",
        loss=r"$-v^\top Wk$",
        step_size="$1$",
        source="arXiv:2006.16236",
    )
    transition: ClassVar = "fades"
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

    def write(self, state: State, token: Tokens) -> State:
        return state + jnp.outer(token.key, self._value(token))

    def read(self, state: State, token: Tokens):
        return self._finish(token.query @ state)

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        del state
        return (LocalLoss(lambda matrix: -agreement(matrix, token, self._value(token))),)

    def chunked(self, tokens: Tokens, state: State, starts: Starts = None) -> RecurrenceOutput:
        out = super().chunked(tokens._replace(value=self._value(tokens)), state, starts)
        return out._replace(output=self._finish(out.output))

    def _value(self, token: Tokens):
        return with_one(token.value) if self.normalized else token.value

    def _finish(self, read):
        return divided(read) if self.normalized else read
