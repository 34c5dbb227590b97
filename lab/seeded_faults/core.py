"""Faults in `fwpkm_jax.core`."""

from lab.seeded_faults.fault import Fault

_SLOTS = ("tests/core/slots",)
_VALUES = ("tests/core/slots/test_value_scan.py", "tests/rules/test_two_phase.py")
_OVERLAYS = ("tests/core/slots/test_overlay.py", "tests/models/test_overlays.py")
_STREAMS = (
    "tests/core/streams",
    "tests/rules/test_contract.py",
    "tests/layers/test_fast_weight_streams.py",
)
_RECURRENCE = ("tests/core/recurrence", "tests/rules/test_contract.py")
_ATTENTION = ("tests/core/attention", "tests/layers/mixers/test_attention.py")
_PARTS = ("tests/layers/mixers/test_parts.py",)

FAULTS = (
    Fault(
        "l2 norm without its epsilon",
        "jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + eps)",
        "jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True))",
        ("tests/core/test_numerics.py",),
    ),
    Fault(
        "layer norm keeps the mean",
        "return rms_normalize(x - jnp.mean(x, axis=-1, keepdims=True), eps=eps)",
        "return rms_normalize(x, eps=eps)",
        ("tests/core/test_numerics.py", "tests/rules/test_titans.py"),
    ),
    Fault(
        "padding: last rows one too late",
        "rows = (end - size)[:, None]",
        "rows = (end - size + 1)[:, None]",
        ("tests/core/test_padding.py", "tests/layers/mixers"),
    ),
    Fault(
        "Newton-Schulz: cubic in place of quintic",
        "(b * square + c * square @ square) @ x",
        "(b * square + c * square) @ x",
        ("tests/rules/test_lact.py", "tests/rules/test_titans.py"),
    ),
    Fault(
        "product keys: best pairs of ranks i * j = top_k left out",
        "keep = (rows + 1) * (columns + 1) <= top_k",
        "keep = (rows + 1) * (columns + 1) < top_k",
        ("tests/core/slots/test_addressing.py",),
    ),
    Fault(
        "product keys: higher slot first among equals",
        "lower = slots[..., None, :] < slots[..., :, None]",
        "lower = slots[..., None, :] > slots[..., :, None]",
        ("tests/core/slots/test_addressing.py",),
    ),
    Fault(
        "addressing gradient: half the slope of inverse distances",
        'return 2.0 * coefficients * jnp.exp(scores) if score == "idw" else coefficients',
        'return coefficients * jnp.exp(scores) if score == "idw" else coefficients',
        ("tests/core/slots/test_addressing.py",),
    ),
    Fault(
        "addressing gradient: softmax not centred",
        "centred = slopes - _sum_of_places(probabilities * slopes)",
        "centred = slopes",
        ("tests/core/slots/test_addressing.py",),
    ),
    Fault(
        "addressing usage: heads not counted in the average",
        "address.sub_key_ids.shape[1] * jnp.sum(token_weights)",
        "jnp.sum(token_weights)",
        ("tests/core/slots/test_addressing.py",),
    ),
    Fault(
        "slot write: sums instead of means",
        "return -self.step_size * weights / jnp.maximum(counts, 1.0)",
        "return -self.step_size * weights",
        ("tests/core/slots/test_table.py",),
    ),
    Fault(
        "slot write: weight decay ascends",
        "values - self.learning_rate * (gradient + self.weight_decay * values)",
        "values - self.learning_rate * (gradient - self.weight_decay * values)",
        ("tests/core/slots/test_table.py",),
    ),
    Fault(
        "grouping: one distinct slot too few",
        "rank.reshape(slot_ids.shape), group[-1] + 1)",
        "rank.reshape(slot_ids.shape), group[-1])",
        ("tests/core/slots/test_grouping.py",),
    ),
    Fault(
        "grouping: places taken for tokens in the counts",
        "counted[groups.order // places] if by_token",
        "counted[groups.order % counted.shape[0]] if by_token",
        ("tests/core/slots/test_grouping.py",),
    ),
    Fault(
        "measures: slots read once collide",
        "jnp.sum(jnp.where(counts > 1, counts, 0.0)) / accesses",
        "jnp.sum(jnp.where(counts > 0, counts, 0.0)) / accesses",
        ("tests/core/slots/test_measures.py",),
    ),
    Fault(
        "value run: all groups read the first group's table",
        "side_by_side(access.slot_ids + offsets[:, None, None, None])",
        "side_by_side(access.slot_ids + 0 * offsets[:, None, None, None])",
        ("tests/rules/test_two_phase.py", "tests/rules/test_contract.py"),
    ),
    Fault(
        "key scan: a step's pull at the keys themselves has no cotangent",
        "keys_bar = keys_bar - step.totals[..., None] * gradient_bar",
        "keys_bar = keys_bar - 0.0 * step.totals[..., None] * gradient_bar",
        ("tests/rules/test_two_phase.py",),
    ),
    Fault(
        "key scan: what the usage sends back to the scores is lost",
        "scores_bar = scores_bar + step.of_access(of_chosen(usage_bar.access, ids))[0]",
        "scores_bar = scores_bar + 0.0 * step.of_access(of_chosen(usage_bar.access, ids))[0]",
        ("tests/rules/test_two_phase.py",),
    ),
    Fault(
        "value scan: what the error sends back to the read is lost",
        "read_bar = output_bar + read_bar",
        "read_bar = output_bar + 0.0 * read_bar",
        _VALUES,
    ),
    Fault(
        "value write: the error without the token's weight",
        "return weight * (read - target)",
        "return weight * 0 + (read - target)",
        _VALUES,
    ),
    Fault(
        "value scan: later writes' cotangents dropped",
        'latest = latest.at[slots].set(places, mode="drop", unique_indices=True)',
        "latest = latest + 0 * places[0]",
        _VALUES,
    ),
    Fault(
        "overlay: a new row starts from zero, not from the base",
        'copied = base.at[slots].get(mode="clip").astype(values.dtype)',
        'copied = 0 * base.at[slots].get(mode="clip").astype(values.dtype)',
        _OVERLAYS,
    ),
    Fault(
        "overlay: slots between the old ones are inserted in the wrong place",
        "old = jnp.arange(capacity, dtype=jnp.int32) - jnp.cumsum(inserted, dtype=jnp.int32)",
        "old = jnp.arange(capacity, dtype=jnp.int32)",
        _OVERLAYS,
    ),
    Fault(
        "overlay: lost rows are read as the base's",
        "rows = jnp.where(values.lost > 0, jnp.nan, rows)",
        "rows = jnp.where(values.lost > rows.shape[0], jnp.nan, rows)",
        _OVERLAYS,
    ),
    Fault(
        "overlay: padding takes rows",
        "slots = jnp.where(counted[:, None] > 0, slot_ids.astype(jnp.int32), padding)",
        "slots = jnp.where(counted[:, None] >= 0, slot_ids.astype(jnp.int32), padding)",
        _OVERLAYS,
    ),
    Fault(
        "retention: two phases leave the steps as they are",
        "steps = side_by_side(scales) * steps",
        "steps = jnp.ones_like(side_by_side(scales)) * steps",
        ("tests/rules/test_two_phase.py",),
    ),
    Fault(
        "replay: a chunk of padding writes stored tokens again",
        "(stored.write_weight > 0) & jnp.any(beside.counted > 0)",
        "stored.write_weight > 0",
        ("tests/core/slots/test_replay.py",),
    ),
    Fault(
        "replay: stored tokens are not written",
        "before, values = before + (written - values), written",
        "before = before + (written - values)",
        ("tests/core/slots/test_replay.py",),
    ),
    Fault(
        "replay: two phases spare what stored tokens write",
        "jnp.where(joined.first[..., None] > 0, 1.0, scales)",
        "1.0 * scales",
        ("tests/rules/test_two_phase.py",),
    ),
    Fault(
        "replay: two phases write the chunk before the stored tokens",
        "[step_of(first), step_of(1.0 - first)]",
        "[step_of(1.0 - first), step_of(first)]",
        ("tests/rules/test_two_phase.py",),
    ),
    Fault(
        "inner steps: each starts from the chunk's own start",
        "before = whole_table(after.values)",
        "before = whole_table(memory.values)",
        ("tests/rules/test_fwpkm.py",),
    ),
    Fault(
        "inner steps: two phases read what the chunk itself has written",
        "output = out.output[:: len(parts)]",
        "output = out.output[len(parts) - 1 :: len(parts)]",
        ("tests/rules/test_two_phase.py",),
    ),
    Fault(
        "retention: relocation changes how much a token learns",
        "return yielding * whole / jnp.where(moved > 0, moved, 1.0)",
        "return yielding * jnp.ones_like(whole)",
        ("tests/core/slots/test_retention.py",),
    ),
    Fault(
        "shared table: norms added, not squares",
        "norm = jnp.sqrt(jax.lax.psum(norm**2, axes.slots or axes.columns))",
        "norm = jax.lax.psum(norm, axes.slots or axes.columns)",
        ("tests/training/test_sharding.py",),
    ),
    Fault(
        "streams: a chunk is written before its lookahead came",
        "return state[1].num_waiting >= limit",
        "return state[1].num_waiting >= chunk_size",
        _STREAMS,
    ),
    Fault(
        "streams: the first token after a write reads the old memory",
        '"position": state[1].num_waiting - lookahead}',
        '"position": state[1].num_waiting - lookahead - 1}',
        _STREAMS,
    ),
    Fault(
        "streams: a document starts from the memory of the one before",
        "(documents.memory, _emptied(pending)),\n        tokens",
        "(memory, _emptied(pending)),\n        tokens",
        ("tests/layers/memories/test_fast_weight.py",),
    ),
    Fault(
        "flush: blocks overlap",
        "written = ((at >= first) & (at < complete))",
        "written = (at < complete)",
        ("tests/rules/test_block_write.py", *_STREAMS),
    ),
    Fault(
        "flush: keeps no token for its target",
        "jnp.minimum(num_waiting, lookahead))",
        "jnp.minimum(num_waiting, 0))",
        _STREAMS,
    ),
    Fault(
        "streams: chunks start anew in each piece",
        "offset = position % chunk",
        "offset = 0 * position",
        ("tests/layers/mixers/test_contract.py", "tests/models/test_streams.py"),
    ),
    Fault(
        "targets: the last token of a chunk has a pair",
        "jnp.broadcast_to(position + lookahead < chunk_end, gate.shape)",
        "jnp.broadcast_to(position + lookahead <= chunk_end, gate.shape)",
        ("tests/core/test_targets.py",),
    ),
    Fault(
        "targets: biased deviation",
        "variance = jnp.sum(centred**2, axis=-1, keepdims=True) / (features - 1)",
        "variance = jnp.sum(centred**2, axis=-1, keepdims=True) / features",
        ("tests/core/test_targets.py",),
    ),
    Fault(
        "recurrence: tokens read before their last write",
        "last = slice(steps - 1, None, steps)",
        "last = slice(0, None, steps)",
        _RECURRENCE,
    ),
    Fault(
        "recurrence: the memory decays by the first token only",
        "state = decay.from_start[:, :, -1, :, None] * state",
        "state = decay.from_start[:, :, 0, :, None] * state",
        _RECURRENCE,
    ),
    Fault(
        "decays: a token's own decay left out",
        "np.concatenate([[other <= token], [other > token], parts])",
        "np.concatenate([[other < token], [other > token], parts])",
        _RECURRENCE,
    ),
    Fault(
        "triangular inverse: gradient on the diagonal",
        "_product(jnp.tril(change, -1), inverse)",
        "_product(jnp.tril(change), inverse)",
        ("tests/core/recurrence/test_triangular.py",),
    ),
    Fault(
        "attention: the window is one token longer",
        "seen &= key_at > at - window",
        "seen &= key_at >= at - window",
        _ATTENTION,
    ),
    Fault(
        "attention: a query that sees no key reads the mean",
        "jnp.where(seen, jax.nn.softmax(scores, axis=-1), 0).astype(value.dtype)",
        "jax.nn.softmax(scores, axis=-1).astype(value.dtype)",
        _ATTENTION,
    ),
    Fault(
        "ring cache: old sums not rescaled",
        "weight = rescale * sums.weight + jnp.sum(weights, axis=-1)",
        "weight = sums.weight + jnp.sum(weights, axis=-1)",
        _ATTENTION,
        under="fwpkm_jax/core/attention",
    ),
    Fault(
        "cross-entropy: logits in bfloat16",
        "logits = jnp.matmul(x, readout, preferred_element_type=compute_dtype(x.dtype))",
        "logits = jnp.matmul(x, readout)",
        ("tests/core/test_cross_entropy.py",),
    ),
    Fault(
        "cross-entropy: the weights' gradient without the upstream factor",
        "return *scaled[:3], None, scaled[3]",
        "return *scaled[:3], None, losses",
        ("tests/core/test_cross_entropy.py",),
    ),
    Fault(
        "parts of a sequence: the first part's keys are not scored by the last",
        "axis.index >= hop, lambda sums",
        "axis.index > hop, lambda sums",
        _PARTS,
    ),
    Fault(
        "parts of a sequence: the second device starts from the empty memory",
        "jnp.where(axis.index > 0, new, old), found, state",
        "jnp.where(axis.index > 1, new, old), found, state",
        _PARTS,
    ),
    Fault(
        "parts of a sequence: transitions are composed with the later one first",
        "joined = join(earlier, part)",
        "joined = join(part, earlier)",
        _PARTS,
    ),
    Fault(
        "parts of a sequence: a document's number does not count the parts before",
        "numbers = numbers + jnp.sum(jnp.where(is_before, every[0], 0), axis=0)[:, None]",
        "numbers = numbers + 0 * jnp.sum(jnp.where(is_before, every[0], 0), axis=0)[:, None]",
        _PARTS,
    ),
    Fault(
        "parts of a sequence: a state in turn is that of the wrong group of sequences",
        "place = jnp.clip(number + 1, 0, groups - 1)",
        "place = jnp.clip(number, 0, groups - 1)",
        _PARTS,
    ),
    Fault(
        "parts of a sequence: the edge has what came before the sequence",
        "is_sent = jnp.arange(width) >= width - known",
        "is_sent = jnp.arange(width) > width - known",
        ("tests/core/test_halo.py",),
    ),
)
