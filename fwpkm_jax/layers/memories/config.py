"""The configuration of a memory layer."""

import functools
import math
from dataclasses import dataclass, field
from typing import Literal

from fwpkm_jax.literals import Positive, check_fields
from fwpkm_jax.rules.base import AbstractChunkRule
from fwpkm_jax.rules.registry import DEFAULT_RULE, make_rule

Normalizer = Literal["none", "standardize", "l2"]
DocumentMemory = Literal["carry", "document"]
"""What a memory makes of rows of several documents, see `FastWeightConfig.documents`."""


@dataclass(frozen=True, kw_only=True)
class FastWeightConfig:
    """A memory block before the token mixer.

    Example:
      >>> from fwpkm_jax import FastWeightConfig, FwMLP
      >>> config = FastWeightConfig(rule=FwMLP(), chunk_size=64)
      >>> config.rule.learning_rate, config.chunk_size
      (0.1, 64)
    """

    rule: AbstractChunkRule = field(default_factory=functools.partial(make_rule, DEFAULT_RULE))
    """The memory and how it is written. The name of a registered rule stands for its defaults."""
    chunk_size: int = 512
    """Tokens of a sequence between two writes."""
    query_norm: Normalizer = "none"
    """Normalisation of each half of the projected query."""
    value_norm: Normalizer = "standardize"
    """Normalisation of the projected value over its features."""
    weight_by_gate: bool = True
    """Weights each token's memory loss by its gate."""
    gate_output: bool = True
    """Mixes read and value by the gate; off: adds them."""
    gate_residual: bool = False
    """Multiplies the layer's whole output by the gate: where the gate is closed, the model is the
    one without the memory. For a memory in a trained model; not in the paper."""
    full_read: Positive | None = None
    """Root mean square from which a read counts in full; below it the layer's whole output is
    multiplied by the square of their ratio. A read of zeros, as of a memory that was told nothing,
    then leaves the model exactly as it was. None: every output counts in full, as in the paper,
    because the norm of the mix gives it one size whatever was read. For a memory in a trained
    model."""
    gate_bias: float = 0.0
    """Initial bias of the gate; its sigmoid is about where the gate starts. 0: a half, as in the
    release; 2: 0.88, so that early writes replace most of what a slot held and a small model learns
    sooner to use its memory. Without a gate it has no effect."""
    documents: DocumentMemory = "carry"
    """Of rows that hold several documents. carry: the memory goes on from one to the next, and only
    pairs end with a document. document: each document starts from the memory that is passed in and
    counts chunks from its first token; for a memory per sequence."""

    @property
    def has_gate(self) -> bool:
        """Whether a layer projects a gate."""
        return self.weight_by_gate or self.gate_in_output

    @property
    def gate_in_output(self) -> bool:
        """Whether a layer's output depends on its gate."""
        return self.gate_output or self.gate_residual

    def __post_init__(self):
        check_fields(self)
        if isinstance(self.rule, str):
            object.__setattr__(self, "rule", make_rule(self.rule))
        if not isinstance(self.rule, AbstractChunkRule):
            raise ValueError(
                f"rule={self.rule!r} is no AbstractChunkRule; a memory layer reads before it "
                "writes."
            )
        if not math.isfinite(self.gate_bias):
            raise ValueError(f"gate_bias={self.gate_bias} must be finite; 0 is a gate of a half.")
        if self.chunk_size <= self.rule.lookahead:
            raise ValueError(
                f"chunk_size={self.chunk_size} must exceed rule.lookahead={self.rule.lookahead}, "
                "or nothing is ever written."
            )
