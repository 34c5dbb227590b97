"""Faults in `fwpkm_jax.training`."""

from lab.seeded_faults.fault import Fault

_STEP = ("tests/training/test_step.py",)
_CHECKPOINTS = ("tests/training/checkpoints", "tests/training/test_loop.py")

FAULTS = (
    Fault(
        "validation: divided by the number of labels",
        "jnp.stack([loss, jnp.sum(weights), right, jnp.sum(answers)])",
        "jnp.stack([loss, jnp.sum(jnp.ones_like(weights)), right, jnp.sum(answers)])",
        ("tests/training/test_validation.py", "tests/training/test_loop.py"),
    ),
    Fault(
        "step: a gradient that is not finite enters the weights",
        "& jnp.isfinite(grad_norm)",
        "& True",
        _STEP,
    ),
    Fault(
        "step: metrics of the last micro-batch only",
        "jax.tree.map(lambda x: jnp.mean(x, axis=0), stacked)",
        "jax.tree.map(lambda x: x[-1], stacked)",
        _STEP,
    ),
    Fault(
        "step: gradients of the last micro-batch only",
        "grads = jax.tree.map(jnp.add, grads, micro_grads)",
        "grads = micro_grads",
        _STEP,
    ),
    Fault(
        "step: a memory that lives one batch is kept",
        "kept = nnx.merge(graphdef, params).restart(state.memory)",
        "kept = found.memory",
        _STEP,
    ),
    Fault(
        "step: micro-batches take other memories' sequences",
        "parts = x.reshape(memory.groups, micro_batches, -1, *x.shape[1:])",
        "parts = x.reshape(micro_batches, memory.groups, -1, *x.shape[1:]).swapaxes(0, 1)",
        _STEP,
    ),
    Fault(
        "optimizer: vectors decay",
        "return self.role in MATRICES if self.decay is None else self.decay",
        "return self.decay is not False",
        ("tests/training/test_optimizer.py",),
    ),
    Fault(
        "optimizer: the warm-up starts too high",
        "optax.linear_schedule(peak / (config.warmup_steps + 1), peak, config.warmup_steps)",
        "optax.linear_schedule(peak / config.warmup_steps, peak, config.warmup_steps)",
        ("tests/training/test_optimizer.py",),
    ),
    Fault(
        "optimizer: clipped after Adam",
        "optimizer = optax.chain(_clip(config.clip_norm), optimizer)",
        "optimizer = optax.chain(optimizer, _clip(config.clip_norm))",
        ("tests/training/test_optimizer.py",),
    ),
    Fault(
        "randomly windowed attention: the same draw at every step",
        "return jax.random.bernoulli(jax.random.fold_in(rng, step), probability)",
        "return jax.random.bernoulli(jax.random.fold_in(rng, 0 * step), probability)",
        ("tests/training/test_random_window.py",),
    ),
    Fault(
        "running statistics: nine tenths of the newest batch",
        "return weight + _SHARE * (new - weight)",
        "return new + _SHARE * (weight - new)",
        ("tests/training/test_batch_norm.py",),
    ),
    Fault(
        "regroup: copies in the wrong order",
        "jnp.repeat(x, groups // saved, axis=0)",
        "jnp.concatenate([x] * (groups // saved))",
        ("tests/training/checkpoints/test_regroup.py",),
    ),
    Fault(
        "checkpoints: the worst is the best",
        "return min(judged, key=lambda step: judged[step])",
        "return max(judged, key=lambda step: judged[step])",
        _CHECKPOINTS,
    ),
)
