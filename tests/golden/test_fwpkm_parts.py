"""One chunk of the memory taken apart, against the authors' release."""

import functools

import jax
import jax.numpy as jnp
import pytest

from fwpkm_jax.core.slots.keys.addressing import (
    product_top_k,
    slot_weights,
    sub_key_scores,
)
from fwpkm_jax.core.slots.values.table import slot_read
from fwpkm_jax.core.slots.write import addressing_gradient, addressing_loss
from fwpkm_jax.rules.fwpkm import key_gradient
from tests.golden import release, vectors

KIND = "fwpkm_parts"


def test_one_chunk_taken_apart(golden_path, dtype):
    file = vectors.open_file(golden_path, dtype)
    rule = release.memory_rule(file.config)
    inputs = {name: x for name, x in file.arrays.items() if name not in file.expected}
    file.assert_matches(jax.jit(functools.partial(_parts, rule))(inputs))


def _parts(rule, arrays):
    """Every intermediate result of one chunk under its name in the file."""
    size = arrays["q"].shape[1]  # The chunk is the whole sequence.
    memory = release.memory(rule, arrays["keys"], arrays["values"])
    chunk = release.sequence(
        rule,
        arrays["q"],
        arrays["ref_v"],
        arrays.get("gates"),
        arrays.get("mask"),
        chunk_size=size,
    )
    tokens = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), chunk)

    scores = sub_key_scores(tokens.query, memory.keys, score=rule.score)
    address = product_top_k(tokens.query, memory.keys, top_k=rule.top_k, score=rule.score)
    weights = slot_weights(
        address.slot_scores, nonlinearity=rule.nonlinearity, temperature=rule.temperature
    ).reshape(scores.shape[0], -1)
    slot_ids = address.slot_ids.reshape(weights.shape)
    read = slot_read(memory.values, slot_ids, weights)
    counts = jnp.zeros((rule.num_slots,), jnp.int32).at[slot_ids].add(1)
    losses = tokens.write_weight * jnp.mean((read - tokens.target) ** 2, -1)
    losses = losses.reshape(chunk.paired.shape)
    loss_of_keys = addressing_gradient(
        tokens.query, memory.keys, address, token_weights=tokens.addressed, score=rule.score
    )

    def half_mean_loss(values):
        error = slot_read(values, slot_ids, weights) - tokens.target
        total = jnp.sum(tokens.write_weight * jnp.mean(error**2, -1))
        return 0.5 * total / jnp.sum(tokens.paired)

    raw = jax.grad(half_mean_loss)(memory.values)
    samples = jnp.round(tokens.factor[0] * jnp.sum(tokens.paired)).astype(jnp.int32)
    places = rule.num_heads * rule.top_k
    scaled = raw * samples * rule.value_dim * places / jnp.maximum(counts, 1)[:, None]
    after = rule.step(memory, tokens).memory
    expected = {
        "sub_scores1": scores[:, :, 0],
        "sub_scores2": scores[:, :, 1],
        "sub_indices1": address.sub_key_ids[:, :, 0],
        "sub_indices2": address.sub_key_ids[:, :, 1],
        "slot_scores": address.slot_scores,
        "indices": address.slot_ids,
        "norm_scores": weights,
        "retrieved": read.reshape(*chunk.paired.shape, -1),
        "losses": losses[:, : size - rule.lookahead].reshape(-1),
        "raw_grad_values": raw,
        "scaled_grad_values": scaled,
        "access_count": counts,
        "num_samples": samples,
        "next_keys": after.keys.reshape(arrays["keys"].shape),
        "next_values": after.values,
    }
    if rule.key_loss != "reconstruction":
        loss = addressing_loss(
            address, num_subkeys=rule.num_subkeys, token_weights=tokens.addressed
        )
        expected["addr_loss"] = rule.addressing_weight * loss
        gradient = rule.addressing_weight * loss_of_keys
        expected["addr_grad_keys"] = gradient.reshape(arrays["keys"].shape)
    moving = key_gradient(rule, memory, tokens, address)
    expected["scaled_grad_keys"] = moving.reshape(arrays["keys"].shape)
    return expected


def test_the_release_fails_without_any_key_gradient():
    config = {"addr_loss": None, "mem_grad_to_values_only": True}
    with pytest.raises(AssertionError, match="key gradient"):
        release._rule(config, subkeys=4, keys=4, values=4, clip=False)
