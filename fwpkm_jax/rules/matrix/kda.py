"""Kimi Delta Attention: one decay per key channel, then a delta step."""

from dataclasses import dataclass
from typing import ClassVar

from fwpkm_jax.literals import Count
from fwpkm_jax.rules.matrix.base import Form
from fwpkm_jax.rules.matrix.gated_deltanet import AbstractGatedDelta
from fwpkm_jax.rules.matrix.recurrence import AbstractRecurrenceRule


@dataclass(frozen=True, kw_only=True)
class KDA(AbstractGatedDelta, AbstractRecurrenceRule):
    """A decay per token, head and key channel, then a delta step of `strength` (β).

    Gated DeltaNet with GLA's decay. Its transition is not symmetric, so that no single loss has it
    as its gradient step: the decay and the delta step are one step each.

    References: Kimi Team 2025, arXiv:2510.26692.
    """

    form: ClassVar[Form] = Form(
        name="KDA",
        right=r"$\mathrm{Diag}(\alpha_t)(I - \beta_t kk^\top)$",
        written=r"$\beta_t vk^\top$",
        loss=r"$\tfrac12\lVert W\,\mathrm{Diag}(\sqrt{1-\alpha_t})\rVert^2$, "
        r"then $\tfrac12\lVert v - Wk\rVert^2$",
        step_size=r"$1$, then $\beta_t$",
        source="arXiv:2510.26692",
    )
    decay: ClassVar = "key"
    strength: ClassVar = True
    delta: ClassVar = True

    chunk_size: Count = 16  # As GLA's.
