"""The configuration of a Titans memory."""

from dataclasses import dataclass
from typing import Literal

from fwpkm_jax.core.recurrence.decay_starts import DecayStart
from fwpkm_jax.literals import check_above_0, check_least, check_literals
from fwpkm_jax.rules.titans import TitansRule


@dataclass(frozen=True, kw_only=True)
class TitansConfig:
    """Shape of a Titans memory, and how it learns."""

    num_heads: int = 12
    """Networks per sequence. With one, it reads and writes the model's whole width, ungated."""
    head_dim: int = 64
    """Width of keys, queries and values."""
    depth: int = 2
    """Matrices of a network, 1 to 4."""
    expansion: float = 2.0
    """Width between the matrices over `head_dim`."""
    residual_norm: bool = True
    """See `TitansRule`."""
    write_size: int = 1
    """Tokens per write: they share momentum and forgetting."""
    chunk_size: int | None = 64
    """Tokens whose gradients are taken at the same weights; a multiple of `write_size`. None: all
    gradients are taken at the initial weights."""
    momentum_order: int = 1
    """See `TitansRule`."""
    combine_momenta: bool = False
    """Steps are a learned mixture of all momentum orders; off: the highest order alone."""
    max_rate: float = 0.1
    """Largest step size; a token's own is this times the sigmoid of a projection."""
    tensor_rates: bool = False
    """A learned share of the step for each tensor of the network."""
    pooling: Literal["mean", "attention"] = "mean"
    """How the tokens of a write are pooled for its momentum and forgetting."""
    max_gradient_norm: float | None = None
    """See `TitansRule`."""
    orthogonalize: bool = False
    """See `TitansRule`."""
    qk_norm: bool = False
    """Norms queries and keys of each head."""
    output_norm: bool = False
    """Norms what each head reads."""
    num_persistent: int = 0
    """Learned tokens in front of every sequence (persistent memory)."""

    forgetting: bool = True
    """Learns what share of the weights each write gives up; off: nothing is given up."""
    bias: bool = False
    """See `TitansRule`."""
    write_norm: bool = True
    """See `TitansRule`."""
    average_steps: bool = False
    """Reads and keeps the mean of a chunk's steps so far in place of their sum, times 1 plus a
    learned share for each position in the chunk; see `TitansRule`. Needs a `chunk_size`."""
    norm_bias: bool = False
    """See `TitansRule`."""
    memory_norm_eps: float = 1e-5
    """`TitansRule.norm_eps`."""
    gelu: Literal["exact", "tanh"] = "exact"
    """See `TitansRule`."""
    memory_init_std: float | None = None
    """`TitansRule.init_std`."""
    decay_start: DecayStart = "constant"
    """Where the share that a write forgets begins: at a hundredth, or at time steps that heads draw
    between 0.001 and 0.1."""

    def __post_init__(self):
        check_literals(self)
        check_least(self, num_heads=1, head_dim=1, write_size=1, num_persistent=0)
        check_above_0(self, "max_rate", "max_gradient_norm", "memory_norm_eps", "memory_init_std")
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
        return TitansRule(
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            hidden_dim=int(self.expansion * self.head_dim),
            depth=self.depth,
            residual_norm=self.residual_norm,
            write_size=self.write_size,
            momentum_order=self.momentum_order,
            loss="mean",
            max_gradient_norm=self.max_gradient_norm,
            orthogonalize=self.orthogonalize,
            bias=self.bias,
            write_norm=self.write_norm,
            average_steps=self.average_steps,
            norm_bias=self.norm_bias,
            norm_eps=self.memory_norm_eps,
            gelu=self.gelu,
            init_std=self.memory_init_std,
            **({"forget": 0.0} if self.average_steps else {}),
        )
