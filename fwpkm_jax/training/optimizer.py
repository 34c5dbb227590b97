"""The optimiser of the slow weights by name, the schedule of its learning rate, clipping."""

import re
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fwpkm_jax.core.numerics import compute_dtype
from fwpkm_jax.core.platform import by_platform
from fwpkm_jax.literals import (
    Count,
    Natural,
    NotNegative,
    OpenShare,
    Positive,
    Share,
    ShareAboveZero,
    check_fields,
)
from fwpkm_jax.models.sharding import declarations
from fwpkm_jax.training.averages import schedule_free, with_ema
from fwpkm_jax.training.state import Precision

_SMALL = 16_384
"""Numbers of an array that joins others as it is: in a sum of all, in an update."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimiser of the slow weights. Fast weights have their own update rule and no optimiser
    state.

    Example:
      >>> from fwpkm_jax import OptimizerConfig
      >>> from fwpkm_jax.training.optimizer import learning_rate_schedule
      >>> config = OptimizerConfig(learning_rate=1e-3, warmup_steps=100)
      >>> schedule = learning_rate_schedule(config, steps=1000)
      >>> [round(float(schedule(step)), 5) for step in (0, 100, 1000)]
      [1e-05, 0.001, 0.0001]
    """

    name: Literal["adamw", "lion", "adafactor", "muon", "schedule_free"] = "adamw"
    """adamw. lion: signs of one moment; its authors advise a rate 3 to 10 times below AdamW's.
    adafactor: a second moment by rows and columns, no first. muon: matrices by one moment made
    orthogonal, at a
    size that suits AdamW's rate (0.2 * sqrt(larger side)); the other parameters by AdamW.
    schedule_free: AdamW whose weights are the average of all iterates, so that its rate needs no
    decay (set schedule=constant); gradients are taken between the average and the newest iterate.
    """
    schedule: Literal["cosine", "warmup_stable_decay", "constant"] = "cosine"
    """How the learning rate goes after the warm-up. warmup_stable_decay: constant, then linear over
    the last `decay_fraction` of the steps to `decay_steps`. constant: to the end."""
    learning_rate: Positive = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    final_fraction: Share = 0.1
    """Learning rate at the end of the decay, as a fraction of the peak, 0 to 1."""
    warmup_steps: Natural = 100
    """Steps over which the learning rate rises linearly to its peak."""
    decay_steps: Count | None = None
    """Step at which the decay ends, warm-up included. None: training.steps."""
    decay_fraction: ShareAboveZero = 0.2
    """Share of the steps over which `warmup_stable_decay` decays, 0 to 1."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment. Of Lion: in the step, and of its moment. Muon's
    moment has the second one; Adafactor has its own. schedule_free has no first moment: the first
    number is the average's share of the weights at which gradients are taken."""
    eps: Positive = 1e-8
    """Added to the square root of AdamW's second moment in the denominator."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay of matrices, embeddings and convolutions. Norm scales, biases, gates
    and other factors do not decay. Each parameter says what it is (`layers.parameters.Role`)."""
    train: tuple[str, ...] = ()
    """Patterns (`re.fullmatch`) of the paths of the parameters to train, such as `.*/memory/.*`, or
    of their roles after `role=`, such as `role=norm_scale|bias`. The others are frozen. (): all
    parameters train."""
    precision: Precision = "float32"
    """dtype of trained weights while they train, of their two moments and of gradients summed over
    micro-batches. float32: 16 bytes per trained weight with AdamW, whatever `model.parameter_dtype`
    is; layers compute in `model.activation_dtype`. parameters: that of `model.parameter_dtype`;
    with bfloat16 half as many bytes, but a step that would change a weight by less than about 1/500
    leaves it as it is. Frozen weights always have the dtype of `model.parameter_dtype`."""
    clip_norm: Positive | None = 1.0
    """Gradients with a larger global norm are scaled down to it. None: no clipping."""
    ema: OpenShare | None = None
    """Decay of an exponential moving average of the trained weights, such as 0.999, 0 to 1. It is
    part of the optimiser's state and of checkpoints, in float32, and evaluation, generation and
    export can use it (`--weights ema`). After step n it decays by at most (n + 1) / (n + 10), so
    that early weights are soon forgotten. None: no average."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must both lie in 0 to 1, 1 excluded.")
        for pattern in self.train:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"train: {pattern!r} is no pattern: {error}.") from error
        if self.name == "schedule_free":
            self._check_schedule_free()

    def _check_schedule_free(self) -> None:
        if self.schedule != "constant":
            raise ValueError(
                f"schedule={self.schedule} lowers the learning rate, which name=schedule_free "
                "replaces by an average; set schedule=constant."
            )
        if not self.betas[0] > 0:
            raise ValueError(
                f"betas={self.betas}: name=schedule_free divides by the first; set it above 0."
            )
        if self.precision != "float32":
            raise ValueError(
                f"precision={self.precision} may store weights in bfloat16, and the steps of "
                "name=schedule_free's average are too small for it; set precision=float32."
            )
        if self.ema is not None:
            raise ValueError(
                f"ema={self.ema}: the weights of name=schedule_free are an average already; leave "
                "ema out."
            )


def learning_rate_schedule(config: OptimizerConfig, *, steps: int) -> optax.Schedule:
    """The learning rate by step: linear warm-up, decay to `final_fraction`, then constant.

    Args:
      steps: length of the run; the decay ends there unless `config.decay_steps` is set.

    If the decay would end within the warm-up, there is no decay.
    """
    decay_steps = steps if config.decay_steps is None else config.decay_steps
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    # Step 0 already updates: the warm-up's first value is peak / (warmup_steps + 1), not 0.
    warmup = optax.linear_schedule(peak / (config.warmup_steps + 1), peak, config.warmup_steps)
    if decay_steps <= config.warmup_steps or config.schedule == "constant":
        return warmup
    if config.schedule == "warmup_stable_decay":
        length = max(round(config.decay_fraction * decay_steps), 1)
        begin = max(decay_steps - length, config.warmup_steps)
        decay = optax.linear_schedule(peak, final, decay_steps - begin)
        return optax.join_schedules([warmup, decay], [begin])
    cosine = optax.cosine_decay_schedule(
        peak, decay_steps - config.warmup_steps, alpha=final / peak
    )
    return optax.join_schedules([warmup, cosine], [config.warmup_steps])


def decay_mask(params: Any) -> Any:
    """True for every parameter that weight decay applies to, in the tree structure of `params`.

    Each parameter says so itself, where it is made: see `layers.parameters.Role`.

    Raises:
      ValueError: a parameter does not say what it is.
    """
    decays = [declared.decays for declared in declarations(params).values()]
    return jax.tree.unflatten(jax.tree.structure(params), decays)


def make_optimizer(config: OptimizerConfig, *, steps: int) -> optax.GradientTransformation:
    """The optimiser as configured, after clipping by the global norm if `clip_norm` is set.

    With `schedule_free`, gradients belong to `averages.gradient_weights`, not to the weights.

    References: AdamW, Loshchilov and Hutter 2019, arXiv:1711.05101; Lion, Chen et al. 2023,
    arXiv:2302.06675; Adafactor, Shazeer and Stern 2018, arXiv:1804.04235; Muon with the size of its
    steps, Liu et al. 2025, arXiv:2502.16982; schedule-free, Defazio et al. 2024, arXiv:2405.15682.
    """
    b1, b2 = config.betas
    schedule = learning_rate_schedule(config, steps=steps)
    if config.name == "adamw":
        optimizer = optax.adamw(
            schedule,
            b1=b1,
            b2=b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        )
    else:
        if config.name == "lion":
            direction = optax.scale_by_lion(b1=b1, b2=b2)
        elif config.name == "schedule_free":
            direction = optax.scale_by_rms(b2, config.eps, eps_in_sqrt=False, bias_correction=True)
        elif config.name == "adafactor":
            direction = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
        else:
            muon = optax.chain(
                optax.contrib.scale_by_muon(
                    beta=b2,
                    # Every matrix maps its first axis to its second, as kernels of linear maps do.
                    weight_dimension_numbers=lambda matrices: jax.tree.map(
                        lambda _: optax.contrib.MuonDimensionNumbers(), matrices
                    ),
                ),
                optax.stateless(_sized),
            )
            adam = optax.scale_by_adam(b1=b1, b2=b2, eps=config.eps)
            direction = optax.partition({"muon": muon, "adam": adam}, _by_muon)
        optimizer = optax.chain(
            direction,
            optax.add_decayed_weights(config.weight_decay, decay_mask),
            optax.scale_by_learning_rate(schedule),
        )
    if config.name == "schedule_free":
        optimizer = schedule_free(optimizer, schedule, b1)
    if config.clip_norm is not None:
        optimizer = optax.chain(_clip(config.clip_norm), optimizer)
    return optimizer if config.ema is None else with_ema(optimizer, config.ema)


def global_norm(tree: Any) -> jax.Array:
    """The norm of all arrays as one vector, in at least float32, with few launches on a GPU.

    A GPU sums an array to one number in two launches, and each array of a model has its own. Here
    an array is summed by rows, in the launch that computes it where there is one, and one launch
    adds the rows of all arrays. XLA would divide that sum by arrays again; the barrier keeps it
    whole.

    Args:
      tree: floating-point arrays, of which none is divided over devices: rows of divided arrays
        would be gathered first, and `optax.tree.norm` suits them.
    """
    rows = []
    for x in jax.tree.leaves(tree):
        square = jnp.square(x.astype(compute_dtype(x.dtype)))
        whole = square.ndim < 2 or square.size <= _SMALL
        rows.append(square.ravel() if whole else jnp.sum(square, axis=-1).ravel())
    if not rows:
        return jnp.zeros((), jnp.float32)
    return jnp.sqrt(jnp.sum(jax.lax.optimization_barrier(jnp.concatenate(rows))))


def side_by_side(tree: Any) -> Any:
    """The same arrays, small ones of one shape and dtype as parts of one array.

    A GPU launches each array's update by itself, and most arrays of a model are so small that the
    launch takes longer than the update. Updates of equal shape that read parts of one array are one
    launch for about 15 of them. XLA would read the arrays themselves again; the barrier keeps the
    array of all.

    Other devices get the arrays as they are.

    Args:
      tree: arrays, of which none is divided over devices: the array of all would gather them.
    """
    return by_platform(gpu=joined, default=lambda tree: tree)(tree)


def joined(tree: Any) -> Any:
    """`side_by_side` as an NVIDIA GPU computes it."""
    leaves, structure = jax.tree.flatten(tree)
    alike: dict[Any, list[int]] = {}
    for index, x in enumerate(leaves):
        if x.size <= _SMALL:
            alike.setdefault((x.shape, x.dtype), []).append(index)
    for places in alike.values():
        if len(places) > 1:
            whole = jax.lax.optimization_barrier(jnp.stack([leaves[i] for i in places]))
            for number, index in enumerate(places):
                leaves[index] = whole[number]
    return jax.tree.unflatten(structure, leaves)


def _clip(norm: float) -> optax.GradientTransformationExtraArgs:
    """As `optax.clip_by_global_norm`, with the gradients' norm from the caller, who reports it."""

    def update(
        updates: Any, state: Any, params: Any = None, *, grad_norm: Any = None, **others: Any
    ) -> tuple[Any, Any]:
        found = global_norm(updates) if grad_norm is None else grad_norm

        def clipped(x: jax.Array) -> jax.Array:
            return jnp.where(found < norm, x, x / found.astype(x.dtype) * norm)

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformationExtraArgs(optax.identity().init, update)


def _by_muon(params: Any) -> Any:
    """ "muon" for matrices, "adam" for the embedding, which is no map, and all other parameters."""
    declared = declarations(params).values()
    leaves, structure = jax.tree.flatten(params)
    labels = [
        "muon" if own.role == "matrix" and x.ndim == 2 else "adam"
        for own, x in zip(declared, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, labels)


def _sized(updates: Any, params: Any) -> Any:
    """Orthogonal updates with elements as large as AdamW's usually are."""
    return jax.tree.map(lambda x: x * (0.2 * jnp.sqrt(max(x.shape)).astype(x.dtype)), updates)
