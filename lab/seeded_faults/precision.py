"""Faults in the precision of what trains: master weights, moments, sums of micro-batches."""

from lab.seeded_faults.fault import Fault

_PRECISION = ("tests/training/test_precision.py",)
_STEP = ("tests/training/test_step.py",)

FAULTS = (
    Fault(
        "precision: weights train in the dtype that the model stores",
        '    if optimizer is not None and precision == "float32":\n',
        '    if optimizer is not None and precision == "float64":\n',
        _PRECISION,
    ),
    Fault(
        "precision: frozen weights become float32, too",
        "x.astype(jnp.promote_types(x.dtype, jnp.float32)) if name in trained else x",
        "x.astype(jnp.promote_types(x.dtype, jnp.float32))",
        _PRECISION,
    ),
    Fault(
        "precision: weights that are read become float32",
        '    if optimizer is not None and precision == "float32":\n',
        '    if precision == "float32":\n',
        _PRECISION,
    ),
    Fault(
        "precision: the first moment is bfloat16",
        "        eps=config.eps,\n",
        '        eps=config.eps,\n        mu_dtype="bfloat16",\n',
        _PRECISION,
        under="fwpkm_jax/training/optimizer.py",
    ),
    Fault(
        "precision: moments are made for the stored weights",
        "opt_state=() if optimizer is None else optimizer.init(trained_part(params, train)),",
        "opt_state=()\n        if optimizer is None\n"
        "        else optimizer.init(trained_part(nnx.state(model), train)),",
        _PRECISION,
    ),
    Fault(
        "precision: micro-batches are summed in bfloat16",
        "grads = jax.tree.map(jnp.add, grads, micro_grads)",
        "grads = jax.tree.map(\n"
        "            lambda x, y: (x + y).astype(jnp.bfloat16).astype(x.dtype),\n"
        "            *(grads, micro_grads),\n"
        "        )",
        (*_STEP, *_PRECISION),
    ),
    Fault(
        "precision: new weights are rounded to bfloat16",
        "params = with_trained(state.params, optax.apply_updates(old, updates), train)",
        "new = optax.apply_updates(old, updates)\n"
        "    new = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), new)\n"
        "    params = with_trained(state.params, new, train)",
        (*_STEP, *_PRECISION),
    ),
    Fault(
        "precision: gradients are rounded to bfloat16 before the update",
        "optimizer.update(found.grads, state.opt_state, old, grad_norm=grad_norm)",
        "optimizer.update(jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), "
        "found.grads), state.opt_state, old, grad_norm=grad_norm)",
        (*_STEP, *_PRECISION),
    ),
    Fault(
        "precision: a checkpoint goes on in the dtype that it was saved in",
        "return x if x.dtype == dtype else _cast(dtype, place)(x)",
        "return x",
        (*_PRECISION, "tests/training/checkpoints"),
    ),
)
