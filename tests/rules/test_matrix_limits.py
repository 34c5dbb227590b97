"""Where rules coincide, and what they promise at their limits."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.recurrence.chunk_decay import softplus_decay
from fwpkm_jax.rules.matrix import MATRIX_RULES, Tokens
from fwpkm_jax.rules.matrix.base import GateInputs, strength_axis
from fwpkm_jax.rules.matrix.comba import Comba
from fwpkm_jax.rules.matrix.deltanet import DeltaNet
from fwpkm_jax.rules.matrix.deltaproduct import DeltaProduct
from fwpkm_jax.rules.matrix.falcon import Falcon
from fwpkm_jax.rules.matrix.falcon_channels import Falcon2, Falcon2A
from fwpkm_jax.rules.matrix.falcon_windows import Falcon3, Falcon3A
from fwpkm_jax.rules.matrix.gated_deltanet import GatedDeltaNet
from fwpkm_jax.rules.matrix.gated_deltanet2 import GatedDeltaNet2
from fwpkm_jax.rules.matrix.gated_deltanet_channels import GatedDeltaNetChannels
from fwpkm_jax.rules.matrix.gated_rfa import GatedRFA
from fwpkm_jax.rules.matrix.gla import GLA
from fwpkm_jax.rules.matrix.hgrn2 import HGRN2
from fwpkm_jax.rules.matrix.kda import KDA
from fwpkm_jax.rules.matrix.lightning import LightningAttention
from fwpkm_jax.rules.matrix.linear_attention import LinearAttention
from fwpkm_jax.rules.matrix.longhorn import Longhorn
from fwpkm_jax.rules.matrix.mamba2 import Mamba2
from fwpkm_jax.rules.matrix.mamba3 import Mamba3, Mamba3State
from fwpkm_jax.rules.matrix.mesa import Mesa
from fwpkm_jax.rules.matrix.mlstm import MLSTM
from fwpkm_jax.rules.matrix.ojanet import OjaNet
from fwpkm_jax.rules.matrix.omega import Omega
from fwpkm_jax.rules.matrix.preconditioned import PreconditionedGatedDeltaNet, PreconditionedKDA
from fwpkm_jax.rules.matrix.retnet import RetNet
from fwpkm_jax.rules.matrix.rwkv7 import RWKV7
from fwpkm_jax.rules.matrix.sdm_heads import SDMHeads
from fwpkm_jax.rules.matrix.slot_attention import (
    AbstractSlotAttention,
    GatedSlotAttention,
    Raven,
)
from tests.rules.matrix_sampling import cast, sample_tokens

pytestmark = pytest.mark.usefixtures("float64")


def tokens_of(rule, **options) -> Tokens:
    return cast(sample_tokens(rule, **options), jnp.float64)


def assert_same(one, other):
    """Outputs, and what both memories hold."""
    np.testing.assert_allclose(one.output, other.output, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(one.final_state, other.final_state, rtol=1e-11, atol=1e-12)


@pytest.mark.thorough
def test_without_decay_gated_deltanet_is_deltanet():
    tokens = tokens_of(GatedDeltaNet())
    kept = tokens._replace(log_decay=jnp.zeros_like(tokens.log_decay))
    assert_same(GatedDeltaNet().run(kept), DeltaNet().run(tokens._replace(log_decay=None)))


@pytest.mark.slow
def test_without_a_turn_and_a_second_write_mamba_3_is_mamba_2():
    tokens = tokens_of(Mamba2())
    alone = jnp.pad(tokens.strength[..., None], [(0, 0)] * 3 + [(0, 3)])
    found, expected = Mamba3().run(tokens._replace(strength=alone)), Mamba2().run(tokens)
    np.testing.assert_allclose(found.output, expected.output, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(
        found.final_state.matrix, expected.final_state, rtol=1e-11, atol=1e-12
    )


@pytest.mark.thorough
def test_a_turn_of_mamba_3_by_all_angles_leaves_lengths_and_undoes_itself():
    """The keys' width is odd: its last channel does not turn."""
    rng = np.random.default_rng(0)
    start = Mamba3State(*map(jnp.asarray, (rng.normal(size=(5, 3)), np.zeros(5), np.zeros(3))))
    turn = Tokens(
        *(jnp.zeros(size) for size in (5, 5, 3)),
        log_decay=jnp.zeros(()),
        strength=jnp.asarray([0.0, 0.0, 0.7, -2.1]),
    )
    there = Mamba3().write(start, turn)
    back = Mamba3().write(there, turn._replace(strength=-turn.strength))
    np.testing.assert_allclose(back.matrix, start.matrix, rtol=1e-12)
    lengths = (np.linalg.norm(x.matrix[:2], axis=0) for x in (start, there))
    np.testing.assert_allclose(*lengths, rtol=1e-12)
    assert np.min(np.abs(there.matrix[:4] - start.matrix[:4])) > 1e-3
    np.testing.assert_array_equal(there.matrix[4], start.matrix[4])


@pytest.mark.thorough
def test_gated_deltanet_2_with_one_number_for_both_gates_is_kda():
    tokens = tokens_of(KDA())
    both = jnp.repeat(tokens.strength[..., None], 4 + 3, axis=-1)
    assert_same(GatedDeltaNet2().run(tokens._replace(strength=both)), KDA().run(tokens))


@pytest.mark.slow_cases("gated_deltanet")
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rule", "plain"),
    [
        (PreconditionedGatedDeltaNet(reach=1.0), GatedDeltaNet()),
        (PreconditionedKDA(reach=1.0), KDA()),
    ],
    ids=["gated_deltanet", "kda"],
)
def test_a_preconditioner_that_reaches_nowhere_leaves_the_plain_rule(rule, plain):
    tokens = tokens_of(rule)
    output, after = plain.run(tokens._replace(strength=tokens.strength[..., 0]))
    found = rule.run(tokens)
    np.testing.assert_allclose(found.output, output, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(found.final_state.matrix, after, rtol=1e-11, atol=1e-12)


@pytest.mark.thorough
def test_one_delta_step_per_token_is_gated_deltanet_and_without_decay_deltanet():
    tokens = tokens_of(GatedDeltaNet())
    once = DeltaProduct(num_steps=1)
    for form in ("run", "recurrent"):
        assert_same(getattr(once, form)(tokens), GatedDeltaNet().run(tokens))
    kept = tokens._replace(log_decay=jnp.zeros_like(tokens.log_decay))
    assert_same(once.run(kept), DeltaNet().run(tokens._replace(log_decay=None)))


@pytest.mark.thorough
def test_several_delta_steps_are_as_many_tokens_of_which_the_last_is_read():
    tokens = tokens_of(DeltaProduct())
    kept = tokens._replace(log_decay=jnp.zeros_like(tokens.log_decay))
    query = jnp.repeat(tokens.query, 2, axis=1)
    deltanet = DeltaNet().run(tokens._replace(query=query, log_decay=None))
    deltanet = deltanet._replace(output=deltanet.output[:, 1::2])
    assert_same(DeltaProduct().run(kept), deltanet)


@pytest.mark.thorough
def test_equal_decays_of_all_channels_make_gla_mamba2_and_constant_ones_retnet():
    tokens = tokens_of(RetNet())
    gates = GateInputs(tokens.query.shape[:3], None, None, None)
    constant = tokens._replace(log_decay=RetNet().gates(gates)[0].astype(jnp.float64))
    for case in (tokens, constant):
        every = jnp.broadcast_to(case.log_decay[..., None], case.key.shape)
        gla = GLA().run(case._replace(log_decay=every))
        assert_same(gla, Mamba2().run(case._replace(strength=jnp.ones(case.key.shape[:3]))))
        assert_same(gla, RetNet().run(case))
    shares = np.exp(np.asarray(constant.log_decay))
    expected = np.broadcast_to([1 - 2**-5, 1 - 2**-6], shares.shape)
    np.testing.assert_allclose(shares, expected, rtol=1e-7)


def test_mamba2_is_retnet_whose_values_are_multiplied_by_the_step():
    tokens = tokens_of(Mamba2())
    scaled = tokens.strength[..., None] * tokens.value
    expected = RetNet().recurrent(tokens._replace(value=scaled, strength=None))
    assert_same(Mamba2().recurrent(tokens), expected)


@pytest.mark.thorough
def test_equal_decays_of_all_channels_make_kda_gated_deltanet():
    tokens = tokens_of(GatedDeltaNet())
    every = jnp.broadcast_to(tokens.log_decay[..., None], tokens.key.shape)
    assert_same(KDA().run(tokens._replace(log_decay=every)), GatedDeltaNet().run(tokens))


@pytest.mark.thorough
def test_equal_strengths_and_full_feedback_make_gated_deltanet_of_its_relatives():
    tokens = tokens_of(GatedDeltaNet())
    expected = GatedDeltaNet().recurrent(tokens)
    each = jnp.broadcast_to(tokens.strength[..., None], tokens.value.shape)
    assert_same(GatedDeltaNetChannels().recurrent(tokens._replace(strength=each)), expected)
    assert_same(Comba(feedback=1.0, correction=0.0).recurrent(tokens), expected)


@pytest.mark.thorough
def test_equal_strengths_of_unit_keys_make_rwkv7_and_falcon_deltanet():
    tokens = tokens_of(DeltaNet())
    expected = DeltaNet().recurrent(tokens)
    each = jnp.broadcast_to(tokens.strength[..., None], tokens.key.shape)
    rwkv7 = tokens._replace(strength=each, log_decay=jnp.zeros_like(each))
    found = RWKV7().recurrent(rwkv7)
    np.testing.assert_allclose(found.output, expected.output, rtol=1e-5, atol=1e-5)
    found = Falcon(ridge=1e-6).recurrent(tokens)
    np.testing.assert_allclose(found.output, expected.output, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_hgrn2_is_gla_with_keys_that_replace_what_decays_and_lightning_retnet_with_other_rates():
    tokens = tokens_of(HGRN2())
    replaced = tokens._replace(log_decay=jnp.log1p(-tokens.key))
    assert_same(HGRN2().recurrent(tokens), GLA().recurrent(replaced))
    rates = LightningAttention().gates(GateInputs((1, 1, 4), None, None, None))[0]
    np.testing.assert_allclose(rates[0, 0], [-1 / 4, -1 / 16, -1 / 64, -1 / 256], rtol=1e-6)
    tokens = tokens_of(RetNet())
    assert_same(LightningAttention().recurrent(tokens), RetNet().recurrent(tokens))


@pytest.mark.thorough
def test_enough_steps_of_conjugate_gradients_read_the_ridge_regression_of_all_pairs():
    tokens = tokens_of(Mesa())
    width, decay = tokens.key.shape[-1], np.exp(np.asarray(tokens.log_decay))
    query, key, value, strength = (
        np.asarray(x) for x in (tokens.query, tokens.key, tokens.value, tokens.strength)
    )
    weighed = strength[..., None] * key
    covariance = np.zeros((*key.shape[:1], *key.shape[2:], width))
    sums = np.zeros((*key.shape[:1], *key.shape[2:], value.shape[-1]))
    expected = np.zeros(value.shape)
    for at in range(key.shape[1]):
        share = decay[:, at, :, None, None]
        covariance = share * covariance + weighed[:, at, :, :, None] * key[:, at, :, None]
        sums = share * sums + weighed[:, at, :, :, None] * value[:, at, :, None]
        solved = np.linalg.solve(covariance + 0.5 * np.eye(width), query[:, at, :, :, None])
        expected[:, at] = np.einsum("bhk,bhkv->bhv", solved[..., 0], sums)
    found = Mesa(cg_steps=width + 2, ridge=0.5).run(tokens)
    np.testing.assert_allclose(found.output, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.thorough
def test_omega_writes_each_error_of_its_window_anew_and_a_window_of_one_is_a_delta_step():
    tokens = tokens_of(GatedDeltaNet())
    kept = tokens._replace(log_decay=jnp.zeros_like(tokens.log_decay))
    deltanet = DeltaNet().recurrent(tokens._replace(log_decay=None))
    np.testing.assert_allclose(
        Omega(window=1).recurrent(kept).final_state.matrix, deltanet.final_state, rtol=1e-11
    )
    found = np.asarray(Omega(window=3).recurrent(tokens).output)
    query, key, value, log_decay, strength = (np.asarray(x[0, :, 0]) for x in tokens)
    matrix = np.zeros((key.shape[-1], value.shape[-1]))
    for at in range(len(key)):
        window = slice(max(at - 2, 0), at + 1)
        errors = strength[window, None] * (value[window] - key[window] @ matrix)
        matrix = np.exp(log_decay[at]) * matrix + key[window].T @ errors / 3
        np.testing.assert_allclose(found[0, at, 0], query[at] @ matrix, rtol=1e-10, atol=1e-12)


@pytest.mark.thorough("1", "2", "3")
@pytest.mark.parametrize(
    ("rule", "window", "error"),
    [
        (Falcon(ridge=0.1), 1, True),
        (Falcon2(ridge=0.1), 1, True),
        (Falcon3(ridge=0.1, window=3), 3, True),
        (Falcon2A(ridge=0.1), 1, False),
        (Falcon3A(ridge=0.1, window=3), 3, False),
        (Falcon3A(ridge=0.1, window=1), 1, False),
    ],
    ids=["1", "2", "3", "2a", "3a", "1a"],
)
def test_falcons_follow_the_published_equations(rule, window, error):
    """Section 4 of arXiv:2608.27763, whose repository holds no code, with pairs (key, value)."""
    tokens = tokens_of(rule, batch=1, heads=1)
    tokens = tokens._replace(key=(2 * tokens.key).at[:, 3].set(0.7))
    found = {form: getattr(rule, form)(tokens).output[0, :, 0] for form in ("run", "recurrent")}
    query, key, value, _, gain = (None if x is None else np.asarray(x[0, :, 0]) for x in tokens)
    memory, outputs = np.zeros((key.shape[1], value.shape[1])), []
    for t in range(len(key)):
        x, y = (a[max(t - window + 1, 0) : t + 1] for a in (key, value))
        largest = np.linalg.eigvalsh(x.T @ x / len(x))[-1]
        energy = largest if error else np.mean(np.sum(x**2, axis=1))
        step = gain[t] / (energy + rule.ridge)
        target = y - x @ memory if error else y
        memory = memory * (1 - step * rule.ridge) + x.T @ target * step / len(x)
        outputs.append(query[t] @ memory)
    for output in found.values():
        np.testing.assert_allclose(output, outputs, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_a_token_of_strength_0_does_not_enter_falcons_window_and_a_document_starts_an_empty_one():
    rule = Falcon3(window=3)
    tokens = tokens_of(rule, batch=1, length=8, heads=1)
    skipped = rule.skip(tokens, jnp.asarray([[True, False, True, True, False, False, True, True]]))
    kept = jax.tree.map(lambda x: x[:, np.array([0, 2, 3, 6, 7])], tokens)
    chex.assert_trees_all_close(
        rule.run(skipped).final_state, rule.run(kept).final_state, rtol=1e-11, atol=1e-12
    )
    starts = jnp.zeros((1, 8), bool).at[0, 5].set(True)
    alone = rule.run(jax.tree.map(lambda x: x[:, 5:], tokens))
    chex.assert_trees_all_close(
        rule.run(tokens, starts=starts).final_state, alone.final_state, rtol=1e-11, atol=1e-12
    )


@pytest.mark.by_default("0.001", "1e-09")
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-9])
def test_the_direction_that_rwkv7_erases_does_not_depend_on_the_length_of_the_key(size):
    tokens = tokens_of(RWKV7())
    key = size * tokens.key / jnp.linalg.norm(tokens.key, axis=-1, keepdims=True)
    tokens = tokens._replace(key=key, value=0 * tokens.value)  # Nothing but decay and erasure.
    start = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)))
    token = jax.tree.map(lambda x: x[0, 0, 0], tokens)
    start = jnp.resize(start, (token.key.size, token.value.size))
    unit, strength = np.asarray(token.key) / size, np.asarray(token.strength)
    expected = np.exp(np.asarray(token.log_decay))[:, None] * np.asarray(start)
    expected -= np.outer(strength * unit, unit @ np.asarray(start))
    np.testing.assert_allclose(RWKV7().write(start, token), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.thorough
def test_comba_corrects_the_query_before_its_norm_and_its_scale():
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 3, 1, 16)) for _ in range(3))
    rule = Comba(feedback=0.5, correction=0.3)
    found = rule.features(*map(jnp.asarray, (query, key, value)))
    corrected = query - 0.3 * 0.5 * key
    length = np.sqrt(np.sum(corrected**2, axis=-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(found[0], corrected / length / 4, rtol=1e-10)
    length = np.sqrt(np.sum(key**2, axis=-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(found[1], key / length, rtol=1e-10)


@pytest.mark.by_default(
    "2.0--30.0--6.914400106940203e-13",
    "89.0--200.0--6.213159586848109e-49",
    "100.0--95.0--148.4131591025766",
    "100.0-0.0--10000.0",
    "89.0-1e+30--10000.0",
    "-200.0--200.0-0.0",
)
@pytest.mark.parametrize(
    ("log_rate", "step", "expected"),
    [
        (0.0, 0.0, -np.log(2)),
        (2.0, -30.0, -np.exp(-28.0)),
        (89.0, -200.0, -np.exp(-111.0)),  # exp(89) alone is beyond float32.
        (100.0, -95.0, -np.exp(5.0)),
        (100.0, 0.0, -1e4),
        (89.0, 1e30, -1e4),
        (-200.0, -200.0, 0.0),
    ],
)
@jax.enable_x64(False)
def test_a_softplus_decay_is_finite_with_its_gradients(log_rate, step, expected):
    arguments = (jnp.float32(log_rate), jnp.float32(step))
    found, gradients = jax.value_and_grad(softplus_decay, argnums=(0, 1))(*arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-30)
    assert np.all(np.isfinite(gradients))


@pytest.mark.thorough
def test_a_short_key_cannot_make_falcons_step_longer_than_half_the_memory():
    tokens = tokens_of(Falcon())
    tokens = tokens._replace(key=jnp.zeros_like(tokens.key), strength=2 + 0 * tokens.strength)
    start = jnp.ones((*tokens.key.shape[:1], *tokens.key.shape[2:], tokens.value.shape[-1]))
    half = Falcon().recurrent(jax.tree.map(lambda x: x[:, :1], tokens), start).final_state
    np.testing.assert_allclose(half, 0.5 * start, rtol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: HGRN2(feature_map="identity"),
        lambda: Comba(feedback=0.0),
        lambda: Comba(correction=-1.0),
        lambda: Falcon(ridge=0.0),
        lambda: Falcon3(window=0),
        lambda: Mesa(ridge=0.0),
        lambda: Mesa(cg_steps=0),
        lambda: Omega(window=0),
        lambda: PreconditionedKDA(reach=0.5),
        lambda: Raven(routed=0.0),
    ],
)
def test_settings_that_break_a_rule_are_refused(make):
    with pytest.raises(ValueError, match=r"leave it at|must be|must lie|is too small"):
        make()


def test_without_decay_retnet_is_linear_attention():
    tokens = tokens_of(RetNet())
    kept = tokens._replace(log_decay=jnp.zeros_like(tokens.log_decay))
    assert_same(RetNet().run(kept), LinearAttention().run(tokens._replace(log_decay=None)))


@pytest.mark.parametrize("rule", [DeltaNet(), OjaNet()], ids=["deltanet", "ojanet"])
def test_full_strength_overwrites_what_the_key_or_the_value_recalls(rule):
    tokens = tokens_of(rule, length=5)
    full = tokens._replace(strength=jnp.ones_like(tokens.strength))
    state = np.asarray(rule.run(full).final_state)  # [batch, heads, key, value]
    key, value = (np.asarray(x)[:, -1] for x in (tokens.key, tokens.value))
    if isinstance(rule, DeltaNet):
        np.testing.assert_allclose(np.einsum("bhk,bhkv->bhv", key, state), value, rtol=1e-10)
    else:
        np.testing.assert_allclose(np.einsum("bhv,bhkv->bhk", value, state), key, rtol=1e-10)


@pytest.mark.thorough
def test_ojanet_is_deltanet_with_keys_and_values_exchanged_but_for_the_read():
    tokens = tokens_of(OjaNet())
    exchanged = tokens._replace(key=tokens.value, value=tokens.key, query=tokens.value)
    swapped = DeltaNet().run(exchanged).final_state.swapaxes(-1, -2)
    np.testing.assert_allclose(OjaNet().run(tokens).final_state, swapped, rtol=1e-11, atol=1e-12)


def test_ojanet_takes_values_at_unit_length():
    tokens = tokens_of(OjaNet())
    value = OjaNet().features(tokens.query, tokens.key, 5 * tokens.value)[2]
    np.testing.assert_allclose(np.linalg.norm(value, axis=-1), 1, rtol=1e-5)


@pytest.mark.slow
def test_without_writes_gated_deltanet_only_decays():
    tokens = tokens_of(GatedDeltaNet(), batch=1, heads=1)
    start = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 4, 3)))
    out = GatedDeltaNet().run(tokens._replace(strength=jnp.zeros_like(tokens.strength)), start)
    share = np.exp(np.sum(tokens.log_decay))
    np.testing.assert_allclose(out.final_state, share * start, rtol=1e-11)


@pytest.mark.slow
def test_the_stabilised_mlstm_is_the_plain_one():
    tokens = tokens_of(MLSTM(), batch=1, heads=1)
    out = MLSTM().run(tokens)
    query, key, value, log_f, log_i = (np.asarray(x)[0, :, 0] for x in tokens)
    matrix, normaliser = np.zeros((4, 3)), np.zeros(4)
    for t in range(len(query)):
        f, i = np.exp(log_f[t]), np.exp(log_i[t])
        matrix, normaliser = (
            f * matrix + i * np.outer(key[t], value[t]),
            f * normaliser + i * key[t],
        )
        expected = query[t] @ matrix / max(abs(normaliser @ query[t]), 1)
        np.testing.assert_allclose(out.output[0, t, 0], expected, rtol=1e-10)
    scale = np.exp(out.final_state.log_scale[0, 0])
    np.testing.assert_allclose(scale * out.final_state.matrix[0, 0, :, :3], matrix, rtol=1e-10)


@pytest.mark.thorough
def test_mlstm_stays_finite_where_its_gates_overflow():
    tokens = tokens_of(MLSTM())._replace(strength=jnp.full((2, 7, 2), 900.0))

    @jax.jit
    def outputs_and_gradient(tokens):
        read = lambda tokens: jnp.sum(MLSTM().run(tokens).output)  # noqa: E731
        return MLSTM().run(tokens), jax.grad(read)(tokens)

    single = cast(tokens, jnp.float32)
    for leaf in jax.tree.leaves(outputs_and_gradient(single)):
        assert np.all(np.isfinite(leaf))


@pytest.mark.slow
def test_normalised_reads_are_weighted_means_of_the_values():
    """Of equal values every weighted mean is that value, whatever the weights."""
    for rule in (LinearAttention(normalized=True, feature_map="elu"), GatedRFA()):
        tokens = tokens_of(rule)
        same = jnp.broadcast_to(jnp.asarray([1.0, -2.0, 3.0]), tokens.value.shape)
        np.testing.assert_allclose(rule.run(tokens._replace(value=same)).output, same, rtol=1e-9)


@pytest.mark.thorough
def test_longhorn_leaves_the_memory_where_its_objective_is_least():
    tokens = tokens_of(Longhorn(), batch=1, length=1, heads=1)
    key, value, strength = 3 * tokens.key[0, 0, 0], tokens.value[0, 0, 0], 0.7
    before = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)))

    @jax.grad
    def slope(matrix):
        change = jnp.sum(jnp.square(matrix - before))
        return change + strength * jnp.sum(jnp.square(value - key @ matrix))

    token = Tokens(key, key, value, strength=jnp.asarray(strength))
    after = Longhorn().write(before, token)
    np.testing.assert_allclose(slope(after), np.zeros((4, 3)), atol=1e-12)
    assert np.max(np.abs(slope(before))) > 0.1


DECAYING = [
    name
    for name, rule in MATRIX_RULES.items()
    if rule.decay != "none" and not issubclass(rule, AbstractSlotAttention | Mamba3 | SDMHeads)
]
"""Not slots, which write everywhere or decay where they are written, nor Mamba-3, whose decay comes
between two reflections."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", DECAYING)
@jax.enable_x64(False)
def test_a_decay_near_1_forgets_the_right_share_in_single_precision(name):
    """By the loss: of rows that the key does not touch, a step takes `1 - exp(log_decay)`."""
    rule = MATRIX_RULES[name]()
    writes = (rule.steps,) if rule.steps > 1 else ()
    token = Tokens(
        query=jnp.ones(4),
        key=jnp.zeros((*writes, 4)).at[..., 0].set(1.0),
        value=jnp.zeros((*writes, 3)),
        log_decay=jnp.full((4,) if rule.decay == "key" else (), -1e-6),
        strength=jnp.full(writes + strength_axis(rule.strength, 4, 3), 0.5)
        if rule.no_strength == 0
        else jnp.zeros(()),
    )
    state = jax.tree.map(lambda x: x[0, 0], rule.init(1, 1, 4, 3, dtype=jnp.float32))
    matrix = jnp.ones_like(rule.matrix(state)).at[0].set(0.0)
    steps = (x.step_size * jax.grad(x.loss)(matrix) for x in rule.losses(state, token))
    np.testing.assert_allclose(sum(steps)[1:], -np.expm1(-1e-6), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [GatedSlotAttention(), Raven()], ids=["gated", "raven"])
@jax.enable_x64(False)
def test_slots_take_on_the_share_that_they_forget_in_single_precision(rule):
    """A token writes all slots; where the share is 1 - exp(-1e-6), in both forms."""
    log_decay = jnp.full((1, 1, 1, 4) if rule.decay == "key" else (1, 1, 1), -1e-6)
    strength = jnp.ones((1, 1, 1, 4)) if rule.strength else None
    tokens = Tokens(*jnp.ones((3, 1, 1, 1, 4)), log_decay=log_decay, strength=strength)
    for form in (rule.run, rule.recurrent):
        np.testing.assert_allclose(form(tokens).final_state, -np.expm1(-1e-6), rtol=1e-5)


@pytest.mark.thorough
def test_raven_writes_the_best_slots_of_its_router_and_keeps_the_others():
    scores = jnp.asarray([[[[0.0, 3.0, -2.0, 1.0]]]])
    inputs = GateInputs((1, 1, 1), jnp.zeros((1, 1, 1)), scores, jnp.zeros((1,)))
    log_decay, weights = Raven(routed=0.5).gates(inputs)
    best = 1 / (1 + np.exp([-3.0, -1.0]))
    expected = np.asarray([0, best[0], 0, best[1]]) / np.sum(best)
    np.testing.assert_allclose(weights[0, 0, 0], expected, rtol=1e-6)
    tokens = tokens_of(Raven(), batch=1, length=1, heads=1)
    tokens = tokens._replace(log_decay=log_decay, strength=weights)
    start = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 4, 7)))
    change = np.asarray(Raven().run(tokens, start).final_state - start)[0, 0]
    np.testing.assert_array_equal(change[[0, 2]], 0)
    assert np.min(np.abs(change[[1, 3]])) > 1e-3


@pytest.mark.thorough
@jax.enable_x64(False)
def test_gated_rfa_writes_the_right_share_near_1_token_by_token_and_in_chunks():
    tokens = cast(sample_tokens(GatedRFA()), jnp.float32)
    slow = tokens._replace(log_decay=jnp.full_like(tokens.log_decay, -1e-7))
    start = 0 * GatedRFA().run(slow).final_state
    after = GatedRFA().recurrent(jax.tree.map(lambda x: x[:, :1], slow), start).final_state
    weights = np.asarray(after)[..., -1] / np.asarray(slow.key)[:, 0]
    np.testing.assert_allclose(weights, -np.expm1(-1e-7), rtol=1e-5)
    np.testing.assert_allclose(
        GatedRFA().recurrent(slow).final_state, GatedRFA().run(slow).final_state, rtol=1e-5
    )
