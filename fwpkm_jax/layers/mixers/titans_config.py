"""The configuration of a Titans memory."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from fwpkm_jax.core.recurrence.decay_starts import DecayStart
from fwpkm_jax.literals import Count, Natural, Positive
from fwpkm_jax.rules.titans import TitansRule, TitansShape


@dataclass(frozen=True, kw_only=True)
class TitansConfig(TitansShape):
    """Shape of a layer with a Titans memory, and how it learns."""

    num_heads: Count = 12
    """Networks per sequence. With one, it reads and writes the model's whole width, ungated."""
    head_dim: Count = 64
    """Width of keys, queries and values."""
    expansion: float = 2.0
    """Width between the matrices over `head_dim`."""
    chunk_size: int | None = 64
    """Tokens whose gradients are taken at the same weights; a multiple of `write_size`. None: all
    gradients are taken at the initial weights."""
    combine_momenta: bool = False
    """Steps are a learned mixture of all momentum orders; off: the highest order alone."""
    max_rate: Positive = 0.1
    """Largest step size; a token's own is this times the sigmoid of a projection."""
    tensor_rates: bool = False
    """A learned share of the step for each tensor of the network."""
    pooling: Literal["mean", "attention"] = "mean"
    """How the tokens of a write are pooled for its momentum and forgetting."""
    qk_norm: bool = False
    """Norms queries and keys of each head."""
    output_norm: bool = False
    """Norms what each head reads."""
    num_persistent: Natural = 0
    """Learned tokens in front of every sequence (persistent memory)."""

    forgetting: bool = True
    """Learns what share of the weights each write gives up; off: nothing is given up."""
    memory_norm_eps: Positive = 1e-5
    """`TitansRule.norm_eps`."""
    memory_init_std: Positive | None = None
    """`TitansRule.init_std`."""
    decay_start: DecayStart = "constant"
    """Where the share that a write forgets begins: at a hundredth, or at time steps that heads draw
    between 0.001 and 0.1."""

    def __post_init__(self):
        super().__post_init__()
        if self.chunk_size is not None and (
            self.chunk_size < 1 or self.chunk_size % self.write_size
        ):
            raise ValueError(
                f"chunk_size={self.chunk_size} must be a multiple of write_size={self.write_size}."
            )
        if self.combine_momenta and self.momentum_order < 2:
            raise ValueError(
                f"combine_momenta=True mixes several orders; momentum_order={self.momentum_order}."
            )
        if self.pooling == "attention" and not (self.forgetting or self.momentum_order):
            raise ValueError(
                "pooling='attention' weighs what momentum and forgetting are told, and there is "
                "neither; use 'mean'."
            )
        if self.average_steps and (self.chunk_size is None or self.forgetting):
            raise ValueError(
                "average_steps=True averages the plain steps of a chunk; give chunk_size a number "
                "of tokens and set forgetting=False."
            )
        if not 1 <= self.expansion * self.head_dim < 2**31:
            raise ValueError(
                f"expansion={self.expansion} of head_dim={self.head_dim} is no width; "
                "usual is an expansion of 2."
            )
        self.rule()

    @property
    def num_tensors(self) -> int:
        """Tensors of a network, each with its own share of the step under `tensor_rates`."""
        return self.depth * (1 + self.bias) + self.residual_norm + self.norm_bias

    def rule(self) -> TitansRule:
        """Builds one head's rule. Raises ValueError if the values are invalid."""
        shape = {field.name: getattr(self, field.name) for field in fields(TitansShape)}
        forget: dict[str, Any] = {"forget": 0.0} if self.average_steps else {}
        return TitansRule(
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            hidden_dim=int(self.expansion * self.head_dim),
            loss="mean",
            norm_eps=self.memory_norm_eps,
            init_std=self.memory_init_std,
            **shape,
            **forget,
        )
