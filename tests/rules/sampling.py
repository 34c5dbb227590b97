"""Random sequences and memories that fit any rule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from fwpkm_jax.core.chunks import AnyChunk, Memory, cast
from fwpkm_jax.core.slots.retention import Retention
from fwpkm_jax.core.streams.streaming import Signals
from fwpkm_jax.rules import AbstractRule, FwPKM
from fwpkm_jax.rules.registry import RulesOf

CHUNKED = dict(RulesOf(AbstractRule))
"""The registered rules that read and write chunk by chunk."""
INSTANCES: dict[str, AbstractRule] = {
    **{name: rule.tiny() for name, rule in CHUNKED.items()},
    "fwpkm_retention": dataclasses.replace(
        FwPKM.tiny(),
        retention=Retention(write_decay=0.1, momentum=0.3, surprise=1.0, protection=0.5),
    ),
}
"""Every registered rule, and what adds arrays to a memory of one."""


def sample_signals(rule: AbstractRule, *, batch=2, length=10, seed=0, masked=False) -> Signals:
    """Queries of unit length, so that no rule's memory grows without bound; float64 NumPy arrays.

    With `masked`, about a third of the tokens is padding, and what stands there is large.
    """
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(batch, length, rule.num_heads, rule.key_dim))
    query = query / np.linalg.norm(query, axis=-1, keepdims=True)
    value = rng.normal(size=(batch, length, rule.value_dim))
    gate = rng.uniform(0.2, 1.0, size=(batch, length))
    mask = np.ones((batch, length))
    if masked:
        mask[rng.uniform(size=mask.shape) < 0.35] = 0
        query = np.where(mask[..., None, None] == 1, query, 30 * query)
        value = np.where(mask[..., None] == 1, value, 100 * value)
    return Signals(query, value, gate, mask)


def to_sequence(rule: AbstractRule, signals: Signals, *, chunk_size: int, dtype) -> AnyChunk:
    """What `rule.run` takes, its arrays in `dtype`."""
    query, value, gate, mask = cast(jax.tree.map(jnp.asarray, signals), dtype)
    sequence = rule.sequence(query, value, gate=gate, mask=mask, chunk_size=chunk_size)
    if "key" in sequence._fields:  # For a rule that need not write where it reads.
        sequence = sequence._replace(key=query[:, :, :, ::-1])
    return sequence


def init_memory(rule: AbstractRule, dtype) -> Memory:
    return jax.tree.map(lambda x: x.astype(dtype), rule.init(jax.random.key(0)))
