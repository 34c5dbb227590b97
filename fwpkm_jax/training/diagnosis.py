"""Finds the first value that is not finite after a loss or a gradient became NaN or infinite."""

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.training.checkpoints.checksum import non_finite_leaves
from fwpkm_jax.training.losses import weighted_loss
from fwpkm_jax.training.micro_batches import Batch, micro_batch_memory, split_batch
from fwpkm_jax.training.state import Memories, MemoryConfig, TrainState, named_leaves

_PARTS = (
    *("embedding", "blocks", "memory_mixer_norm", "memory_mixer", "memory"),
    *("mixer_norm", "mixer", "mixer_output_norm"),
    *("feed_forward_norm", "feed_forward", "feed_forward_output_norm"),
    *("final_norm", "fast_weight_layer", "head", "head_bias"),
)
"""Parts of a model and of its blocks, in the order of the forward pass."""


class NonFiniteError(RuntimeError):
    """Training met a NaN or an infinity; names where it began and the last good checkpoint."""


def diagnose(
    graphdef: nnx.GraphDef[LanguageModel],
    state: TrainState,
    batch: Batch,
    *,
    clean_memory: Memories,
    micro_batches: int,
    memory: MemoryConfig,
) -> str:
    """A sentence that names the first parameter, layer or memory that is not finite.

    The failed step left the parameters as they were but has written to the fast weights. So the
    pass is repeated from the initial fast weights. A value that is not finite even then comes from
    a layer; otherwise the fast weights became non-finite first. The pass runs outside jit.

    Returns:
      A clause without a full stop, for an error message.
    """
    bad = sorted(non_finite_leaves(state.params), key=_order)
    if bad:
        return f"the parameter {bad[0]} ({_count(state.params, bad[0])}) is not finite"
    bad_inputs = [name for name, x in batch.items() if not np.all(np.isfinite(x))]
    if bad_inputs:
        return f"the batch's {bad_inputs[0]} is not finite"

    model = nnx.merge(graphdef, state.params)
    pieces = split_batch(batch, micro_batches=micro_batches, memory=memory)
    start = micro_batch_memory(clean_memory, memory, micro_batches)
    for index in range(micro_batches):
        micro = jax.tree.map(lambda x, index=index: jnp.asarray(x[index]), pieces)
        layer = _first_bad_layer(model, micro, start)
        if layer is not None:
            return f"the output of {layer} is not finite, but its input is finite"
    bad = sorted(non_finite_leaves(state.memory), key=_order)
    if bad:
        return f"the fast weights {bad[0]} ({_count(state.memory, bad[0])}) are not finite"
    for index in range(micro_batches):
        micro = jax.tree.map(lambda x, index=index: jnp.asarray(x[index]), pieces)
        bad = _bad_gradients(graphdef, state.params, micro, start)
        if bad:
            return (
                f"the gradient of {bad[-1]} is not finite; of the {len(bad)} parameters with such "
                "gradients it is the last in the model, so the backward pass reached it first"
            )
    return (
        "parameters, fast weights and every layer's output are finite, and a pass from clean fast "
        "weights does not repeat it: their values grew too large for this batch"
    )


def _count(tree: Any, name: str) -> str:
    leaf = named_leaves(tree)[name]
    return f"{int(jnp.sum(~jnp.isfinite(leaf)))} of {leaf.size} values"


def _order(name: str) -> list[tuple[int, str]]:
    """Sort key that puts names in the order of the forward pass, layer 10 after layer 9."""
    words = [word for word in re.split(r"/|(\d+)", name) if word]
    return [
        (_PARTS.index(word) if word in _PARTS else int(word) if word.isdecimal() else 0, word)
        for word in words
    ]


def _first_bad_layer(model: LanguageModel, batch: Batch, memory: Memories) -> str | None:
    """The path of the first innermost module with finite inputs and non-finite outputs, or None."""
    with _watch_modules(model) as found:
        output = model(batch["tokens"][:, :-1], memory, segment_ids=batch.get("segment_ids"))
        loss = weighted_loss(output.logits, batch["tokens"][:, 1:], batch["loss_weight"])
    if found:
        return found[0]
    return None if bool(jnp.isfinite(loss)) else "the loss"


@contextlib.contextmanager
def _watch_modules(model: nnx.Module) -> Iterator[list[str]]:
    """Collects the paths of modules whose call turned finite inputs into non-finite outputs.

    Flax has no forward hooks, so the classes' `__call__` is wrapped while the context lasts. The
    values of a module called inside a scan are tracers; the module around the scan is reported.
    """
    found: list[str] = []
    paths = {id(module): "/".join(map(str, path)) for path, module in nnx.iter_modules(model)}
    originals = {
        type(module): vars(type(module))["__call__"]
        for _, module in nnx.iter_modules(model)
        if "__call__" in vars(type(module))
    }

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def call(module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            output = original(module, *args, **kwargs)
            inputs_finite = _finite((args, kwargs))
            if id(module) in paths and inputs_finite and not _finite(output):
                found.append(paths[id(module)] or "the model")
            return output

        return call

    try:
        for cls, original in originals.items():
            cls.__call__ = wrap(original)
        yield found
    finally:
        for cls, original in originals.items():
            cls.__call__ = original


def _finite(tree: Any) -> bool:
    """Whether every concrete floating-point array in a tree is finite."""
    return all(
        bool(jnp.all(jnp.isfinite(x)))
        for x in jax.tree.leaves(tree)
        if isinstance(x, jax.Array | np.ndarray)
        and not isinstance(x, Tracer)
        and jnp.issubdtype(x.dtype, np.inexact)
    )


def _bad_gradients(
    graphdef: nnx.GraphDef[LanguageModel], params: Any, batch: Batch, memory: Memories
) -> list[str]:
    """Names of the parameters whose gradient is not finite, in the model's order."""

    def loss_fn(params: Any) -> jax.Array:
        output = nnx.merge(graphdef, params)(
            batch["tokens"][:, :-1], memory, segment_ids=batch.get("segment_ids")
        )
        return weighted_loss(output.logits, batch["tokens"][:, 1:], batch["loss_weight"])

    return sorted(non_finite_leaves(jax.jit(jax.grad(loss_fn))(params)), key=_order)
