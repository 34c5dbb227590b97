"""Random sequences and memories that fit any rule."""

import dataclasses

import jax
import jax.numpy as jnp

from fwpkm_jax.core.chunks import AnyChunk, Memory, cast
from fwpkm_jax.core.slots.options.retention import Retention
from fwpkm_jax.core.streams.pending import Signals
from fwpkm_jax.rules import AbstractRule, FwPKM
from fwpkm_jax.rules.registry import RulesOf
from fwpkm_jax.testing.rule_case import sample_signals

__all__ = [
    "CHUNKED",
    "INSTANCES",
    "init_memory",
    "sample_signals",
    "to_sequence",
    "with_all_fields",
]

CHUNKED = dict(RulesOf(AbstractRule))
"""The registered rules that read and write chunk by chunk."""
INSTANCES: dict[str, AbstractRule] = {
    **{name: rule.tiny() for name, rule in CHUNKED.items()},
    "fwpkm_retention": dataclasses.replace(
        FwPKM.tiny(),
        retention=Retention(hardening=0.5, relocation=1.0, replay=3),
    ),
}
"""Every registered rule, and what adds arrays to a memory of one."""


def with_keys(rule: AbstractRule, query, value, **options) -> AnyChunk:
    """What `rule.run` takes; a rule that need not write where it reads gets keys of its own."""
    sequence = rule.sequence(query, value, **options)
    if "key" in sequence._fields:
        sequence = sequence._replace(key=query[:, :, :, ::-1])
    return sequence


def with_all_fields(rule: AbstractRule, query, value, **options) -> AnyChunk:
    """`with_keys`, and a factor for a rule of slots."""
    sequence = with_keys(rule, query, value, **options)
    if "factor" in sequence._fields:
        factor = 1 + 0.5 * sequence.counted * sequence.write_weight
        sequence = sequence._replace(factor=factor)
    return sequence


def to_sequence(rule: AbstractRule, signals: Signals, *, chunk_size: int, dtype) -> AnyChunk:
    """What `rule.run` takes, its arrays in `dtype`."""
    query, value, gate, mask = cast(jax.tree.map(jnp.asarray, signals), dtype)
    return with_keys(rule, query, value, gate=gate, mask=mask, chunk_size=chunk_size)


def init_memory(rule: AbstractRule, dtype) -> Memory:
    return jax.tree.map(lambda x: x.astype(dtype), rule.init(jax.random.key(0)))
