"""The optimiser of the slow weights: AdamW, warm-up, cosine decay, optional clipping."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import jax
import optax

from fwpkm_jax.literals import check_literals
from fwpkm_jax.models.sharding import declarations
from fwpkm_jax.training.state import Precision


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW over the slow weights. Fast weights have their own update rule and no optimiser state.

    Example:
      >>> from fwpkm_jax import OptimizerConfig
      >>> from fwpkm_jax.training.optimizer import learning_rate_schedule
      >>> config = OptimizerConfig(learning_rate=1e-3, warmup_steps=100)
      >>> schedule = learning_rate_schedule(config, steps=1000)
      >>> [round(float(schedule(step)), 5) for step in (0, 100, 1000)]
      [1e-05, 0.001, 0.0001]
    """

    learning_rate: float = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    final_fraction: float = 0.1
    """Learning rate at the end of the decay, as a fraction of the peak, 0 to 1."""
    warmup_steps: int = 100
    """Steps over which the learning rate rises linearly to its peak."""
    decay_steps: int | None = None
    """Step at which the cosine decay ends, warm-up included. None: training.steps."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment in the denominator."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices, embeddings and convolutions. Norm scales, biases, gates
    and other factors do not decay. Each parameter says what it is (`layers.parameters.Role`)."""
    train: tuple[str, ...] = ()
    """Patterns (`re.fullmatch`) of the paths of the parameters to train, such as `.*/memory/.*`, or
    of their roles after `role=`, such as `role=norm_scale|bias`. The others are frozen. (): all
    parameters train."""
    precision: Precision = "float32"
    """dtype of trained weights while they train, of their two moments and of gradients summed over
    micro-batches. float32: 16 bytes per trained weight, whatever `model.parameter_dtype` is; layers
    compute in `model.activation_dtype`. parameters: that of `model.parameter_dtype`; with bfloat16
    8 bytes per trained weight, but a step that would change a weight by less than about 1/500
    leaves it as it is. Frozen weights always have the dtype of `model.parameter_dtype`."""
    clip_norm: float | None = 1.0
    """Gradients with a larger global norm are scaled down to it. None: no clipping."""

    def __post_init__(self) -> None:
        check_literals(self)
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate} must be above 0.")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"final_fraction={self.final_fraction} must lie in 0 to 1.")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps} is negative; 0 means no warm-up.")
        if self.decay_steps is not None and self.decay_steps < 1:
            raise ValueError(
                f"decay_steps={self.decay_steps} must be at least 1, or None for training.steps."
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must both lie in 0 to 1, 1 excluded.")
        if not self.eps > 0:
            raise ValueError(f"eps={self.eps} must be above 0.")
        for pattern in self.train:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"train: {pattern!r} is no pattern: {error}.") from error
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay={self.weight_decay} is negative; 0 turns it off.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(
                f"clip_norm={self.clip_norm} must be above 0; None turns clipping off."
            )


def describe_precision(config: OptimizerConfig) -> str:
    """What trained weights take: a weight, its gradient and two moments."""
    if config.precision == "float32":
        return "float32 weights and moments, 16 bytes per trained weight (8 with parameters)"
    return (
        "weights and moments in model.parameter_dtype, in bfloat16 8 bytes per trained weight and "
        "without small changes (16 with float32)"
    )


def learning_rate_schedule(config: OptimizerConfig, *, steps: int) -> optax.Schedule:
    """The learning rate by step: linear warm-up, cosine to `final_fraction`, then constant.

    Args:
      config: the optimiser's configuration.
      steps: length of the run; the decay ends there unless `config.decay_steps` is set.

    If the decay would end within the warm-up, there is no decay.
    """
    decay_steps = steps if config.decay_steps is None else config.decay_steps
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    # Step 0 already updates: the warm-up's first value is peak / (warmup_steps + 1), not 0.
    warmup = optax.linear_schedule(peak / (config.warmup_steps + 1), peak, config.warmup_steps)
    if decay_steps <= config.warmup_steps:
        return warmup
    cosine = optax.cosine_decay_schedule(
        peak, decay_steps - config.warmup_steps, alpha=final / peak
    )
    return optax.join_schedules([warmup, cosine], [config.warmup_steps])


def decay_mask(params: Any) -> Any:
    """True for every parameter that weight decay applies to, in the tree structure of `params`.

    Each parameter says so itself, where it is made: see `layers.parameters.Role`.

    Args:
      params: arrays or their shapes, in Flax variables.

    Raises:
      ValueError: a parameter does not say what it is.
    """
    decays = [declared.decays for declared in declarations(params).values()]
    return jax.tree.unflatten(jax.tree.structure(params), decays)


def make_optimizer(config: OptimizerConfig, *, steps: int) -> optax.GradientTransformation:
    """AdamW as configured, after clipping by the global norm if `clip_norm` is set.

    Args:
      config: the optimiser's configuration.
      steps: length of the run, see `learning_rate_schedule`.
    """
    adamw = optax.adamw(
        learning_rate_schedule(config, steps=steps),
        b1=config.betas[0],
        b2=config.betas[1],
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )
    if config.clip_norm is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
