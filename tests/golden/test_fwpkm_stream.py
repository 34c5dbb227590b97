"""Streaming, against the authors' release: where both queue rules agree, and where theirs is
replayed on the core write."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.streams import streaming
from fwpkm_jax.core.streams.pending import Signals, init_pending
from tests.golden import release, vectors

KIND = "fwpkm_stream"


@functools.partial(jax.jit, static_argnums=(0, 4))
def _push(rule, memory, pending, piece, chunk_size):
    one = jax.tree.map(lambda x: x[None], (memory, pending, piece))
    out = streaming.push(rule, *one, chunk_size=chunk_size)[:3]
    return jax.tree.map(lambda x: x[0], out)


def _inputs(file):
    arrays = file.arrays
    return (arrays["q"], arrays["ref_v"], arrays.get("gates"), arrays.get("mask"))


@pytest.mark.slow
def test_until_the_first_write_both_rules_agree(golden_path, dtype):
    file = vectors.open_file(golden_path, dtype)
    rule, arrays = release.memory_rule(file.config), file.arrays
    query, value, gate, mask = _inputs(file)
    updated = arrays["updated"].astype(bool)
    quiet = int(np.argmax(updated)) if updated.any() else updated.size
    pieces = file.config["pieces"][:quiet]
    length = sum(pieces)
    if length == 0:  # The first piece is written: nothing to compare before it.
        length = min(file.config["pieces"][0], file.config["chunk_size"])
        pieces = [length]
    ones = jnp.ones(query.shape[:2], query.dtype)
    signals = Signals(
        query.reshape(*query.shape[:2], rule.num_heads, rule.key_dim),
        value,
        ones if gate is None else gate,
        ones if mask is None else mask,
    )
    memory = start = release.memory(rule, arrays["keys"], arrays["values"])
    first = Signals(*(x[None, :, :1] for x in signals))
    pending = init_pending(first, file.config["chunk_size"] + rule.lookahead)
    pending = jax.tree.map(lambda x: x[0], pending)
    outputs, begin = [], 0
    for piece in pieces:
        part = Signals(*(x[:, begin : begin + piece] for x in signals))
        begin += piece
        memory, pending, output = _push(rule, memory, pending, part, file.config["chunk_size"])
        outputs.append(output)
    output = jnp.concatenate(outputs, axis=1)
    vectors.assert_matches("output", output, arrays["output"][:, :length], golden_path, dtype)
    if quiet:
        assert int(pending.num_waiting) == arrays["queue_length"][quiet - 1]
    np.testing.assert_array_equal(memory.values, start.values)
    np.testing.assert_array_equal(memory.keys, start.keys)


def test_the_release_queue_replayed_on_the_core_write(golden_path, dtype):
    file = vectors.open_file(golden_path, dtype)
    rule, config, keys = release.memory_rule(file.config), file.config, file.arrays["keys"]
    start = release.memory(rule, keys, file.arrays["values"])
    options = {"chunk_size": config["chunk_size"]}
    records = jax.jit(
        lambda start, inputs: list(
            release.stream(rule, start, *inputs, config["pieces"], **options)
        )
    )(start, _inputs(file))
    weight = 0.0 if rule.key_loss == "reconstruction" else rule.addressing_weight
    shape = (*file.arrays["q"].shape[:2], rule.num_heads, rule.top_k)

    def joined(name):
        return jnp.concatenate([record[name] for record in records], axis=1)

    addressing = [
        weight * jnp.mean(jnp.stack(r["addressing_losses"])) if r["updated"] else jnp.zeros(())
        for r in records
    ]
    losses = [loss for record in records for loss in record["losses"]]
    all_keys = jnp.stack([r["memory"].keys.reshape(keys.shape) for r in records])
    all_values = jnp.stack([r["memory"].values for r in records])
    results = {
        "output": joined("output"),
        "indices": joined("slot_ids").reshape(shape),
        "scores": joined("slot_weights").reshape(shape),
        "updated": np.array([r["updated"] for r in records]),
        "queue_length": np.array([r["queue_length"] for r in records]),
        "addr_loss": jnp.asarray(addressing, dtype),
        "keys_after_piece": all_keys,
        "values_after_piece": all_values,
        "final_keys": all_keys[-1],
        "final_values": all_values[-1],
    }
    if losses:
        results["losses"] = jnp.concatenate(losses, axis=1)
    file.assert_matches(results)
