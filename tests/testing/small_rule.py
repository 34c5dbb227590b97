"""A small memory of no method, with faults to plant, each of which breaks a property."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fwpkm_jax.core.chunks import StepOutput, map_groups, scan_chunks
from fwpkm_jax.rules import AbstractChunkRule


class SmallInfo(NamedTuple):
    size: Any


class SmallAccess(NamedTuple):
    slot_ids: Any
    slot_weights: Any


@dataclass(frozen=True, kw_only=True)
class SmallRule(AbstractChunkRule):
    """Adds each token's target to a matrix under its query; starts at zero."""

    key_dim: int = 4
    value_dim: int = 3
    lookahead: int = 0
    fault: str = ""

    @property
    def num_slots(self):
        return {"slots_out_of_range": 5, "slots_without_values": 6}.get(self.fault)

    def init(self, rng):
        del rng
        dtype = jnp.bfloat16 if self.fault == "starts_in_bfloat16" else jnp.float32
        start = np.random.rand() if self.fault == "starts_anyhow" else 0.0  # noqa: NPY002
        return jnp.full((self.key_dim, self.value_dim), start, dtype)

    def sequence(self, query, value, *, gate=None, mask=None, chunk_size, **options):
        if self.fault == "passes_write_twice_as_much" and gate is not None:
            gate = 2 * gate
        return super().sequence(
            query, value, gate=gate, mask=mask, chunk_size=chunk_size, **options
        )

    def targets(self, value):
        target = super().targets(value)
        if self.fault == "targets_of_all_tokens":
            target = target + 0.1 * jnp.mean(value, axis=1, keepdims=True)
        return target

    def read(self, memory, query):
        query = query[:, 0].astype(memory.dtype)
        if self.fault == "reads_other_tokens":
            query = query - jnp.mean(query, axis=0, keepdims=True)
        access = None
        if self.num_slots is not None:
            ids = jnp.full((query.shape[0], 1), 5, jnp.int32)
            access = SmallAccess(ids, jnp.ones(ids.shape, query.dtype))
        return query @ memory, access

    def step(self, memory, chunk):
        query, target, weight = (
            x.astype(memory.dtype) for x in (chunk.query, chunk.target, chunk.write_weight)
        )
        output, access = self.read(memory, query)
        if self.fault == "nan_gradient":
            output = output + jnp.sqrt(0.0 * jnp.sum(target**2, axis=-1, keepdims=True))
        if self.fault == "weights_have_no_gradient":
            weight = jax.lax.stop_gradient(weight)
        if self.fault == "writes_padding":
            weight = jnp.ones_like(weight)
        if self.fault == "never_writes":
            weight = 0 * weight
        if self.fault == "decays_at_padding":
            memory = 0.9 * memory
        memory = memory + jnp.einsum("tk,tv,t->kv", query[:, 0], target, weight)
        if self.fault == "memory_takes_the_tokens_dtype":
            memory = memory.astype(chunk.query.dtype)
        if self.fault == "reads_its_own_write":
            output = self.read(memory, query)[0]
        size = jnp.sum(memory**2)
        if self.fault == "reports_vectors":
            size = jnp.sum(memory**2, axis=0)
        return StepOutput(memory, output, access, SmallInfo(size))

    def write(self, memory, chunk):
        memory = super().write(memory, chunk)
        return 1.01 * memory if self.fault == "write_is_not_the_steps" else memory

    def write_blocks(self, memory, blocks):
        if self.fault == "forgets_the_last_block":
            blocks = blocks._replace(number=jnp.maximum(blocks.number - 1, 0))
            return blocks.fold(lambda n, memory: self.write(memory, blocks.block(n)), memory)
        return super().write_blocks(memory, blocks)

    def run(self, memory, sequence, *, chunk_size):
        if self.fault == "leaks_the_future":
            memory = memory + jnp.mean(sequence.target, axis=(0, 1))
        if self.fault == "forgets_the_start":
            memory = 0 * memory
        out = scan_chunks(self.step, memory, sequence, chunk_size=chunk_size)
        if self.fault == "pass_with_another_gradient":
            output = out.output + 0.1 * (out.output - jax.lax.stop_gradient(out.output))
            return out._replace(output=output)
        if self.fault == "bfloat16_outputs":
            return out._replace(output=out.output.astype(sequence.query.dtype))
        return out

    def run_groups(self, memory, sequence, *, chunk_size, axes=None):
        if self.fault == "groups_share_a_memory":
            memory = memory + jnp.mean(sequence.target, axis=(0, 1, 2))
        return map_groups(lambda m, s: self.run(m, s, chunk_size=chunk_size), memory, sequence)

    def memory_specs(self, memory, *, group_axes, axes):
        if self.fault == "specs_of_another_tree":
            return (PartitionSpec(group_axes),) * 2
        return super().memory_specs(memory, group_axes=group_axes, axes=axes)


@dataclass(kw_only=True, unsafe_hash=True)
class ThawedRule(AbstractChunkRule):
    """Its fields can be assigned."""

    key_dim: int = 4
    value_dim: int = 3
    init = SmallRule.init
    read = SmallRule.read
    step = SmallRule.step
