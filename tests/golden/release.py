"""The authors' release in terms of this package: configuration, constants, queue rule.

What the release does beyond the mathematics enters here, through arguments of the core write.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fwpkm_jax.core.slots.write import SlotChunk, SlotWriteWeights
from fwpkm_jax.core.targets import WriteWeights, shift_left, write_weights
from fwpkm_jax.rules import FwMLP, FwPKM, FwPKMMemory

MLP_LOSSES = {"mse": "squared", "mae": "absolute", "l1": "absolute"}
SCORES = {"idw": "idw", "dot_product": "dot"}
_MEMORY_FIELDS = {
    "T", "addr_loss", "addr_loss_weight", "batch", "chunk_size", "gates", "grad_clip", "heads",
    "k_dim", "learning_rate", "lookahead", "mask", "mem_grad_to_values_only", "n_subkeys",
    "pieces", "q_scale", "qk_score_type", "score_nonlinear", "score_temperature", "topk", "v_dim",
    "weight_decay",
}  # fmt: skip

# Fields of fwpkm_block and lm files that `block_rule` and the tests read, and those they fix.
BLOCK_FIELDS = (
    *("fwpkm_addr_loss", "fwpkm_addr_loss_weight", "fwpkm_compress_query", "fwpkm_compress_value"),
    *("fwpkm_grad_clip", "fwpkm_heads", "fwpkm_k_dim", "fwpkm_layers", "fwpkm_loss_type"),
    *("fwpkm_mem_grad_to_values_only", "fwpkm_n_subkeys", "fwpkm_optimizer_lr"),
    *("fwpkm_optimizer_type", "fwpkm_optimizer_weight_decay", "fwpkm_out_fuse_gate"),
    *("fwpkm_qk_score_type", "fwpkm_score_nonlinear", "fwpkm_score_temperature"),
    *("fwpkm_target_value_lookahead", "fwpkm_topk", "fwpkm_update_chunk_size", "fwpkm_v_dim"),
    *("fwpkm_variant", "fwpkm_weight_loss_with_gates"),
)
BLOCK_FIXED = {
    "fwpkm_before_attn": True,
    "fwpkm_fp32_fw": True,
    "fwpkm_query_src": "hidden",
    "fwpkm_value_src": "hidden",
}


def memory_rule(config: dict) -> FwPKM:
    """The rule of a fwpkm_parts, _forward, _grad or _stream file."""
    unknown = set(config) - _MEMORY_FIELDS
    assert not unknown, f"fields this harness does not know: {sorted(unknown)}"
    return _rule(
        config,
        subkeys=config["n_subkeys"],
        keys=config["k_dim"],
        values=config["v_dim"],
        clip=config["grad_clip"],
    )


def block_rule(config: dict) -> FwPKM | FwMLP:
    """The rule of a fwpkm_block or lm file, whose fields start with `fwpkm_`."""
    if config["fwpkm_variant"] == "mlp":
        # The rest of the fields is FwPKM's; the decoder always averages the targets.
        return FwMLP(
            key_dim=config["fwpkm_k_dim"],
            value_dim=config["fwpkm_v_dim"],
            hidden_dim=config["fwpkm_n_subkeys"],
            lookahead=config["fwpkm_target_value_lookahead"],
            target="mean",
            learning_rate=config["fwpkm_optimizer_lr"],
            weight_decay=config["fwpkm_optimizer_weight_decay"],
            loss=MLP_LOSSES[config["fwpkm_loss_type"]],
            write_clip=1.0 if config["fwpkm_grad_clip"] else None,
        )
    known = {
        "qk_score_type": config["fwpkm_qk_score_type"],
        "heads": config["fwpkm_heads"],
        "topk": config["fwpkm_topk"],
        "lookahead": config["fwpkm_target_value_lookahead"],
        "learning_rate": config["fwpkm_optimizer_lr"],
        "addr_loss": config["fwpkm_addr_loss"],
        "addr_loss_weight": config["fwpkm_addr_loss_weight"],
        "mem_grad_to_values_only": config["fwpkm_mem_grad_to_values_only"],
        "score_nonlinear": config["fwpkm_score_nonlinear"],
        "score_temperature": config["fwpkm_score_temperature"],
        "weight_decay": config["fwpkm_optimizer_weight_decay"],
    }
    assert config["fwpkm_loss_type"] == "mse"
    assert config["fwpkm_optimizer_type"] == "sgd"
    return _rule(
        known,
        subkeys=config["fwpkm_n_subkeys"],
        keys=config["fwpkm_k_dim"],
        values=config["fwpkm_v_dim"],
        clip=config["fwpkm_grad_clip"],
    )


def _rule(config: dict, *, subkeys: int, keys: int, values: int, clip: bool) -> FwPKM:
    assert config["addr_loss"] in ("me", None)
    if config["addr_loss"] is None:
        assert not config["mem_grad_to_values_only"], "the release fails without any key gradient"
        key_loss = "reconstruction"
    else:
        key_loss = "addressing" if config["mem_grad_to_values_only"] else "both"
    return FwPKM(
        num_subkeys=subkeys,
        key_dim=keys,
        value_dim=values,
        num_heads=config["heads"],
        top_k=config["topk"],
        lookahead=config["lookahead"],
        score=SCORES[config["qk_score_type"]],
        learning_rate=config["learning_rate"],
        key_loss=key_loss,
        addressing_weight=config["addr_loss_weight"],
        nonlinearity=config["score_nonlinear"],
        temperature=config["score_temperature"],
        write_clip=1.0 if clip else None,
        weight_decay=config["weight_decay"],
    )


def memory(rule: FwPKM, keys: jax.Array, values: jax.Array) -> FwPKMMemory:
    return FwPKMMemory(keys.reshape(rule.num_heads, 2, rule.num_subkeys, -1), values)


def pairing(gate, mask, *, chunk_size: int, lookahead: int) -> SlotWriteWeights:
    """The release's write weights: the mask at t alone, masked reads counted, steps rescaled.

    It averages over the P pairs of a chunk and multiplies by S, the chunk's tokens (without a
    mask) or the real ones among those that can be paired.
    """
    batch, length = gate.shape
    position = np.arange(length)
    start = position // chunk_size * chunk_size
    sizes = np.minimum(start + chunk_size, length) - start
    paired = (position - start + lookahead < sizes).astype(np.float64)
    num_pairs = batch * np.maximum(sizes - lookahead, 0)
    chunk_of = np.equal.outer(start, start).astype(np.float64)  # [length, length]
    ones = jnp.ones_like(gate)
    if mask is None:
        samples = jnp.asarray(batch * sizes, gate.dtype)
    else:
        real = jnp.sum((mask != 0) * jnp.asarray(paired, gate.dtype)[None], axis=0)
        samples = jnp.asarray(chunk_of, gate.dtype) @ real
    factor = samples / jnp.asarray(np.maximum(num_pairs, 1), gate.dtype)
    paired = jnp.broadcast_to(jnp.asarray(paired, gate.dtype), gate.shape)
    real = ones if mask is None else mask.astype(gate.dtype)
    factor = jnp.broadcast_to(factor, gate.shape)
    return SlotWriteWeights(gate * real * paired, paired, ones, ones, factor)


def mlp_pairing(gate, mask, *, chunk_size: int, lookahead: int) -> WriteWeights:
    """The write weights of the fast MLP: a mean over all pairs, to which masked ones add 0.

    The rule takes the mean over the tokens that write, so that their weights make up for it.
    """
    paired = write_weights(gate, None, chunk_size=chunk_size, lookahead=lookahead)
    if mask is None:
        return paired
    written = paired.paired * (mask != 0).astype(gate.dtype)
    chunk_of = np.arange(gate.shape[1]) // chunk_size
    same = jnp.asarray(np.equal.outer(chunk_of, chunk_of), gate.dtype)
    pairs, real = (same @ jnp.sum(x, axis=0) for x in (paired.paired, written))
    share = real / jnp.maximum(pairs, 1)
    return paired._replace(write=gate * mask.astype(gate.dtype) * written * share[None])


def sequence(rule: FwPKM, query, values, gate, mask, *, chunk_size: int) -> SlotChunk:
    """Whole sequences with the release's weights; queries `[batch, length, heads * key]`."""
    if gate is None:
        gate = jnp.ones(query.shape[:2], query.dtype)
    weights = pairing(gate, mask, chunk_size=chunk_size, lookahead=rule.lookahead)
    query = query.reshape(*query.shape[:2], rule.num_heads, rule.key_dim)
    return SlotChunk(query, shift_left(values, rule.lookahead), *weights)


def paired_only(losses, *, chunk_size: int, lookahead: int):
    """Drops the tokens `[batch, length]` that have no target in their chunk, as the release."""
    length = losses.shape[1]
    position = np.arange(length)
    end = np.minimum((position // chunk_size + 1) * chunk_size, length)
    return losses[:, position + lookahead < end]


def stream(rule: FwPKM, start: FwPKMMemory, query, values, gate, mask, pieces, *, chunk_size: int):
    """Replays the release's queue on the core write.

    A step happens once `chunk_size` tokens are queued at the end of a cut, uses all but the last
    `lookahead` of them, counts the reads of the last cut only, and without a mask scales by the
    last cut's length.

    Yields one dict per piece: output, slot_ids, slot_weights, updated, queue_length, losses,
    addressing_losses, memory.
    """
    batch = query.shape[0]
    query = query.reshape(batch, -1, rule.num_heads, rule.key_dim)
    lookahead, now, first = rule.lookahead, start, 0
    queue = np.arange(0)  # Positions in the stream.
    for piece in pieces:
        positions = np.arange(first, first + piece)
        first += piece
        record = {"updated": 0, "losses": [], "addressing_losses": []}
        reads = []
        for cut in cuts(positions, queue.size, chunk_size=chunk_size, lookahead=lookahead):
            output, access = rule.read(now, query[:, cut].reshape(-1, *query.shape[2:]))
            reads.append(
                jax.tree.map(lambda x: x.reshape(batch, -1, *x.shape[1:]), (output, *access))
            )
            queue = np.concatenate([queue, cut])
            if queue.size >= chunk_size:
                chunk = _queued_chunk(rule, query, values, gate, mask, queue, last_cut=cut.size)
                step = rule.step(now, chunk)
                now = step.memory
                losses = chunk.write_weight * jnp.mean((step.output - chunk.target) ** 2, -1)
                losses = losses.reshape(batch, -1)[:, : queue.size - lookahead]
                record["losses"].append(losses)
                record["addressing_losses"].append(step.info.addressing_loss)
                record["updated"] = 1
                queue = queue[queue.size - lookahead :]
        output, slot_ids, weights = (jnp.concatenate(x, axis=1) for x in zip(*reads, strict=True))
        yield record | {
            "output": output,
            "slot_ids": slot_ids,
            "slot_weights": weights,
            "queue_length": queue.size,
            "memory": now,
        }


def cuts(positions, queued: int, *, chunk_size: int, lookahead: int):
    """A piece cut where the release ends a read: when the queue is full, then every chunk."""
    room = chunk_size + lookahead - queued
    while positions.size:
        yield positions[:room]
        positions, room = positions[room:], chunk_size


def _queued_chunk(rule, query, values, gate, mask, queue, *, last_cut: int) -> SlotChunk:
    """The write of one queue: all but its last tokens write, the last cut alone is counted."""
    batch, size = query.shape[0], queue.size
    dtype = query.dtype
    pairs = np.arange(size) < size - rule.lookahead
    in_last_cut = np.arange(size) >= size - last_cut

    def tokens(x):
        return x.reshape(batch * size, *x.shape[2:])

    def spread(x):
        return tokens(jnp.broadcast_to(jnp.asarray(x, dtype), (batch, size)))

    weight = spread(pairs)
    for factor in (gate, mask):
        if factor is not None:
            weight = weight * tokens(factor[:, queue])
    if mask is None:
        samples = batch * last_cut
    else:
        samples = jnp.sum(mask[:, queue[pairs]] != 0).astype(dtype)
    return SlotChunk(
        query=tokens(query[:, queue]),
        target=tokens(shift_left(values[:, queue], rule.lookahead)),
        write_weight=weight,
        paired=spread(pairs),
        counted=spread(in_last_cut),
        addressed=spread(pairs),
        factor=spread(jnp.full((size,), 1.0, dtype) * samples / (batch * pairs.sum())),
    )
