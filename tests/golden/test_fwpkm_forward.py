"""The chunked read-then-write pass over a sequence, against the authors' release."""

import jax
import jax.numpy as jnp

from tests.golden import release, vectors

KIND = "fwpkm_forward"
INPUTS = ("q", "ref_v", "gates", "keys", "values")


def forward_and_inputs(file):
    """The pass of a fwpkm_forward or fwpkm_grad file as a function of `INPUTS`, and these."""
    rule, arrays = release.memory_rule(file.config), file.arrays
    chunk_size = file.config["chunk_size"]

    def forward(q, ref_v, gates, keys, values):
        memory = release.memory(rule, keys, values)
        sequence = release.sequence(
            rule, q, ref_v, gates, arrays.get("mask"), chunk_size=chunk_size
        )
        out = rule.run(memory, sequence, chunk_size=chunk_size)
        return out.output, _results(file, rule, sequence, out)

    return forward, tuple(arrays.get(name) for name in INPUTS)


def _results(file, rule, sequence, out):
    """A pass as the file's arrays."""
    chunk_size = file.config["chunk_size"]
    shape = (*out.output.shape[:2], rule.num_heads, rule.top_k)
    losses = sequence.write_weight * jnp.mean((out.output - sequence.target) ** 2, -1)
    addressing = rule.addressing_weight * jnp.mean(out.info.addressing_loss)
    if rule.key_loss == "reconstruction":
        addressing = jnp.zeros_like(addressing)
    return {
        "output": out.output,
        "indices": out.access.slot_ids.reshape(shape),
        "scores": out.access.slot_weights.reshape(shape),
        "losses": release.paired_only(losses, chunk_size=chunk_size, lookahead=rule.lookahead),
        "addr_loss": addressing,
        "final_keys": out.memory.keys.reshape(file.arrays["keys"].shape),
        "final_values": out.memory.values,
    }


def test_a_pass_over_a_sequence(golden_path, dtype):
    file = vectors.open_file(golden_path, dtype)
    forward, inputs = forward_and_inputs(file)
    file.assert_matches(jax.jit(forward)(*inputs)[1])
