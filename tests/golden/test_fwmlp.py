"""The fast-weight SwiGLU, whole and in the release's pieces, against the authors' release."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.chunks import Chunk
from fwpkm_jax.rules import FwMLP
from tests.golden import release
from tests.golden.vectors import config_values, open_file
from tests.golden.weights import memory_of, release_weights

KIND = "fwmlp"
TARGETS = {"last": "later", "mean": "mean"}


@pytest.mark.thorough
def test_the_fast_mlp_matches_the_release(golden_path, dtype):
    file = open_file(golden_path, dtype)
    config = config_values(
        golden_path,
        file.config,
        required=(
            *("T", "batch", "chunk_size", "input_dim", "output_dim", "size", "learning_rate"),
            *("lookahead", "lookahead_strategy", "weight_decay", "pieces"),
            *("grad_clip", "loss_type", "mask"),
        ),
        known={},
    )
    assert config["mask"] == ("mask" in file.arrays)
    rule = FwMLP(
        key_dim=config["input_dim"],
        value_dim=config["output_dim"],
        hidden_dim=config["size"],
        lookahead=config["lookahead"],
        target=TARGETS[config["lookahead_strategy"]],
        learning_rate=config["learning_rate"],
        weight_decay=config["weight_decay"],
        loss=release.MLP_LOSSES[config["loss_type"]],
        write_clip=1.0 if config["grad_clip"] else None,
    )
    weights = {name[2:]: x for name, x in file.arrays.items() if name.startswith("w:")}
    run = _whole if config["pieces"] is None else _in_pieces
    results = jax.jit(lambda *x: run(rule, file, *x))
    file.assert_matches(results(file.arrays["q"], file.arrays["ref_v"], weights))


def _losses(rule, output, target, mask):
    """Of each token."""
    size = jnp.square if rule.loss == "squared" else jnp.abs
    losses = jnp.mean(size(output - target), axis=-1)
    return losses if mask is None else losses * mask


def _whole(rule, file, query, value, weights):
    chunk_size, mask = file.config["chunk_size"], file.arrays.get("mask")
    options = {"chunk_size": chunk_size, "lookahead": rule.lookahead}

    def run(query, value, weights):
        sequence = rule.sequence(
            *(query[:, :, None], value),
            mask=mask,
            chunk_size=chunk_size,
            pairing=release.mlp_pairing,
        )
        out = rule.run(memory_of(rule, weights), sequence, chunk_size=chunk_size)
        return out.output, (out.memory, sequence.target)

    output, pullback, (memory, target) = jax.vjp(run, query, value, weights, has_aux=True)
    d_query, d_value, d_weights = pullback(file.arrays["cotangent"])
    return {
        "output": output,
        "losses": release.paired_only(_losses(rule, output, target, mask), **options),
        "d_q": d_query,
        "d_ref_v": d_value,
        **{f"d:{name}": x for name, x in d_weights.items()},
        **{f"after:{name}": x for name, x in release_weights(memory).items()},
    }


def _in_pieces(rule, file, query, value, weights):
    """The release's queue (see `release.stream`) on the rule's own read and write."""
    config, memory = file.config, memory_of(rule, weights)
    batch, chunk_size, lookahead = query.shape[0], config["chunk_size"], rule.lookahead
    outputs, losses, updated, first = [], [], [], 0
    mask = file.arrays.get("mask")
    queue = np.arange(0)
    for piece in config["pieces"]:
        positions = np.arange(first, first + piece)
        first += piece
        updated.append(0)
        for cut in release.cuts(positions, queue.size, chunk_size=chunk_size, lookahead=lookahead):
            output, _ = rule.read(memory, query[:, cut].reshape(-1, 1, query.shape[-1]))
            outputs.append(output.reshape(batch, cut.size, -1))
            queue = np.concatenate([queue, cut])
            if queue.size < chunk_size:
                continue
            pairs = jnp.arange(queue.size) < queue.size - lookahead
            weight = jnp.broadcast_to(pairs.astype(query.dtype), (batch, queue.size))
            of_queue = None if mask is None else mask[:, queue]
            if of_queue is not None:  # The mean is over all pairs.
                real = jnp.mean((of_queue[:, : queue.size - lookahead] != 0).astype(query.dtype))
                weight = weight * of_queue * real
            step = rule.step(
                memory,
                Chunk(
                    query[:, queue].reshape(-1, 1, query.shape[-1]),
                    rule.targets(value[:, queue]).reshape(-1, value.shape[-1]),
                    *[weight.reshape(-1)] * 3,
                ),
            )
            target = rule.targets(value[:, queue])
            read = step.output.reshape(batch, queue.size, -1)
            of_step = _losses(rule, read, target, of_queue)
            losses.append(of_step[:, : queue.size - lookahead])
            memory, updated[-1] = step.memory, 1
            queue = queue[queue.size - lookahead :]
    return {
        "output": jnp.concatenate(outputs, axis=1),
        "losses": jnp.concatenate(losses, axis=1),
        "updated": np.array(updated),
        **{f"after:{name}": x for name, x in release_weights(memory).items()},
    }
