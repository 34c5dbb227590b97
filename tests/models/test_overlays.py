"""Users over one base get, bit for bit, what a private memory for each would give them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax import overlays
from fwpkm_jax.evaluation.readers.fast_weight_dtype import as_stored
from fwpkm_jax.evaluation.recall import _share_out
from fwpkm_jax.evaluation.record import first_group
from fwpkm_jax.generation import generate, init_generation
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers.attention import AttentionConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.rules import FwPKM

pytestmark = pytest.mark.two_phase
RULE = FwPKM(num_subkeys=6, key_dim=8, value_dim=5, num_heads=2, top_k=2)
CONFIG = ModelConfig(
    vocab_size=11,
    model_dim=8,
    mixers=("swa",),
    mlp_dim=8,
    memory_layers=(0,),
    window=4,
    attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=4, rotary_fraction=0.5),
    fast_weight=FastWeightConfig(rule=RULE, chunk_size=4),
    activation_dtype="float32",
)
USERS, LENGTH, CAPACITY, NAME = 3, 12, 33, "layer_0"
TOKENS = np.random.default_rng(0).integers(11, size=(USERS, LENGTH), dtype=np.int32)
MASK = np.ones((USERS, LENGTH), np.float32)
MASK[0, :3] = MASK[1, 6:8] = 0
SLOTS = np.random.default_rng(1).permutation(RULE.num_slots)


@functools.cache
def model_and_base():
    """A model whose memory matters, and the memory that all users share."""
    model = LanguageModel(CONFIG, rngs=nnx.Rngs(0))
    model.blocks[0].memory.query_proj.kernel[...] *= 50.0
    return model, model.init_memory(jax.random.key(1))


def private_start(base, *, full):
    """Memories that differ from the base: user 0 in no slot, 1 in three, 2 in three or `full`."""
    keys, values = (np.repeat(np.asarray(x), USERS, axis=0) for x in base[NAME][:2])
    keys[1] += 0.1
    values[1, SLOTS[:3]] += 1.0
    values[2, SLOTS[: full or 3]] -= 1.0
    return {NAME: base[NAME]._replace(keys=jnp.asarray(keys), values=jnp.asarray(values))}


@functools.cache
def read_all():
    """One program: whole rows; then a stream in two pieces and a flush."""
    graphdef, params = nnx.split(model_and_base()[0])

    def run(memory):
        model, tokens, mask = nnx.merge(graphdef, params), jnp.asarray(TOKENS), jnp.asarray(MASK)
        whole = model(tokens, memory, mask=mask)

        def read(stream, piece):
            out = model.stream(piece[0], stream, mask=piece[1])
            return out.stream, out.logits

        pieces = [jnp.stack(jnp.split(x, 2, axis=1)) for x in (tokens, mask)]
        stream = model.init_stream(memory, batch=USERS, max_length=LENGTH)
        stream, logits = jax.lax.scan(read, stream, pieces)
        logits = jnp.concatenate([*logits], axis=1)
        memories = whole.memory, stream.memory, model.flush(stream).memory
        return (whole.logits, logits), memories, whole.info[NAME].access.slot_ids

    return jax.jit(run)


@functools.cache
def both(full):
    model, base = model_and_base()
    private = private_start(base, full=full)
    overlay = overlays.to_overlay(model, private, base, capacity=CAPACITY)
    return read_all()(private), read_all()(overlay)


def assert_equal_logits(actual, expected, users):
    for own, private in zip(actual, expected, strict=True):
        real = MASK[users] > 0  # What padding reads has no meaning.
        np.testing.assert_array_equal(own[users][real], private[users][real])


@pytest.mark.slow
def test_overlays_equal_private_memories_bit_for_bit():
    (logits, memories, slot_ids), (own_logits, own_memories, _) = both(None)
    assert_equal_logits(own_logits, logits, slice(None))
    for own, private in zip(own_memories, memories, strict=True):
        chex.assert_trees_all_equal(overlays.to_private(own), private)
        use = overlays.overlay_use(own)[NAME]
        base = np.asarray(model_and_base()[1][NAME].values)
        changed = (np.asarray(private[NAME].values) != base).any(-1).sum(1)
        assert (use.rows >= changed).all()
        assert (use.rows < RULE.num_slots).all()
        assert not use.lost.any()
        np.testing.assert_array_equal(use.bytes, use.rows * (5 * 4 + 8))
        start = private_start(model_and_base()[1], full=None)[NAME]
        assert (private[NAME].values != start.values).any(axis=(1, 2)).all()
    rows = overlays.overlay_use(own_memories[0])[NAME].rows
    before = [(), SLOTS[:3], SLOTS[:3]]
    for user, held in enumerate(before):
        read = np.asarray(slot_ids[user])[MASK[user] > 0]  # Padding takes no rows.
        assert rows[user] == len({*read.ravel(), *held})


@pytest.mark.thorough
def test_lost_rows_are_counted_and_never_read():
    (logits, *_), (own_logits, own_memories, _) = both(CAPACITY)
    fine, full = slice(0, 2), 2
    assert_equal_logits(own_logits, logits, fine)
    whole, streamed = own_logits
    assert np.isnan(whole[full]).any()
    assert np.isnan(streamed[full, LENGTH // 2 :]).all()
    for own in own_memories:
        lost = overlays.overlay_use(own)[NAME].lost
        assert lost[full] > 0
        assert not lost[fine].any()
        for refuses in (overlays.refuse_lost, overlays.to_private):
            with pytest.raises(ValueError, match=r"layer_0.*capacity=33.*user 2 lost"):
                refuses(own)
        assert overlays.to_private(overlays.take_users(own, [1, 0]))
    model, base = model_and_base()
    early = overlays.to_overlay(model, private_start(base, full=None), base, capacity=CAPACITY)
    values = early[NAME].values
    lost = values.lost.at[1].set(1)
    _, streamed = read_all()({NAME: early[NAME]._replace(values=values._replace(lost=lost))})[0]
    np.testing.assert_array_equal(np.isnan(streamed).all(axis=(1, 2)), [False, True, False])


@pytest.mark.slow
def test_overlays_are_joined_resized_and_moved_to_another_base():
    model, base = model_and_base()
    fork = overlays.fork_memory(model, base, users=2, capacity=4)
    assert not overlays.overlay_use(fork)[NAME].rows.any()
    private = private_start(base, full=None)
    small = overlays.to_overlay(model, private, base, capacity=3)
    chex.assert_trees_all_equal(overlays.with_capacity(overlays.with_capacity(small, 9), 3), small)
    joined = overlays.join_users([fork, overlays.with_capacity(small, 4)])
    chex.assert_trees_all_equal(
        overlays.to_private(overlays.take_users(joined, [2, 3, 4])), private
    )
    chex.assert_trees_all_equal(overlays.to_private(overlays.take_users(joined, [1])), base)
    other = overlays.to_private(overlays.take_users(small, [1]))
    moved = overlays.to_overlay(model, small, other, capacity=6)
    np.testing.assert_array_equal(overlays.overlay_use(moved)[NAME].rows, [3, 0, 3])
    chex.assert_trees_all_equal(overlays.to_private(moved), private)
    with pytest.raises(ValueError, match="different bases"):
        overlays.join_users([moved, overlays.with_capacity(small, 6)])
    for refuses in (
        lambda: overlays.to_overlay(model, private, base, capacity=2),
        lambda: overlays.with_capacity(small, 2),
    ):
        with pytest.raises(ValueError, match=r"capacity=2.*3 "):
            refuses()


@pytest.mark.slow
def test_evaluations_take_overlays():
    model, base = model_and_base()
    fork = overlays.to_overlay(model, private_start(base, full=None), base, capacity=4)
    chex.assert_trees_all_equal(first_group(fork), overlays.take_users(fork, [0]))
    shared_out = _share_out(overlays.take_users(fork, [1]), 2)
    chex.assert_trees_all_equal(shared_out, overlays.take_users(fork, [1, 1]))
    rounded = overlays.to_private(as_stored(fork, "bfloat16"))
    chex.assert_trees_all_equal(rounded, as_stored(overlays.to_private(fork), "bfloat16"))


@pytest.mark.slow
def test_generation_refuses_a_user_who_lost_rows():
    model, base = model_and_base()
    memory = overlays.fork_memory(model, base, users=1, capacity=1)
    values = memory[NAME].values
    memory = {NAME: memory[NAME]._replace(values=values._replace(lost=values.lost + 2))}
    state = init_generation(model, memory, batch=1, max_length=LENGTH)
    state = state._replace(num_read=state.num_read + 1)
    with pytest.raises(ValueError, match="user 0 lost 2"):
        generate(model, None, state, max_new_tokens=1)


@pytest.mark.slow
def test_a_kept_state_shares_its_base_with_the_states_after_it():
    model, base = model_and_base()
    memory = overlays.fork_memory(model, base, users=1, capacity=1)
    state = init_generation(model, memory, batch=1, max_length=LENGTH)
    state = state._replace(num_read=state.num_read + 1)
    once = generate(model, None, state, max_new_tokens=1, keep_state=True)
    again = generate(model, None, state, max_new_tokens=1)
    chex.assert_trees_all_equal(once, again)
    tables = [x.stream.memory[NAME].values for x in (state, once.state, again.state)]
    assert len({id(table.base.array) for table in tables}) == 1
    assert tables[0].rows.is_deleted()
