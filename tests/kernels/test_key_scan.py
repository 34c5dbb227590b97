"""The kernels of the scan of the keys, each against plain XLA, and whole scans."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fwpkm_jax.core.slots.keys.addressing import best_sub_keys
from fwpkm_jax.core.slots.keys.scan import KeyLoops, key_scan
from fwpkm_jax.core.slots.keys.sums import add_to_sub_keys, sub_key_totals
from fwpkm_jax.core.slots.write import KeyWrite
from fwpkm_jax.rules import FwPKM
from pallas_kernels import dispatch
from pallas_kernels.key_scan import gpu_add
from pallas_kernels.key_scan.api import KEY_SCAN, key_loops
from pallas_kernels.key_scan.gpu_add import TILE, add, query_terms, totals
from pallas_kernels.key_scan.gpu_rows import pulls_back, step, step_back, to_queries
from pallas_kernels.key_scan.specs import CHECK_RATIO, CHECKED, DTYPES, SPECS, errors_of
from tests.kernels.entry import checked_again, equal_or_close, programs

CHUNKS, CHUNK, HEADS, CODEBOOKS, TOP_K = 3, 1, 2, 4, 3
KEEP, MOVE = 0.9, -0.4


def draw(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def draw_ids(tokens, subkeys):
    every = np.random.default_rng(tokens).random((CHUNKS, CODEBOOKS, subkeys, tokens))
    return jnp.asarray(every.argsort(2)[:, :, :TOP_K], jnp.int32)


def by_token(x):
    return jnp.moveaxis(x.reshape(HEADS, 2, *x.shape[1:]), -1, 0)


@pytest.mark.slow
@pytest.mark.slow_cases("of_one_chunk")
@pytest.mark.parametrize("of_all", [False, True], ids=["of_one_chunk", "of_all_chunks"])
def test_queries_are_added_to_the_chosen_sub_keys_in_parts(of_all, monkeypatch):
    # Two parts of five tiles: from the third on they arrive in memory that was in use.
    monkeypatch.setattr(gpu_add, "SPLITS", 2)
    tokens, subkeys, half = 10 * TILE, 2 * TILE, 2 * TILE
    ids, queries = draw_ids(tokens, subkeys), draw(CHUNKS, tokens, CODEBOOKS * half)
    coefficients = draw(CHUNKS if of_all else 1, CODEBOOKS, TOP_K, tokens)
    with dispatch.interpret_kernels("gpu"):
        terms = query_terms(queries)
        sums, of_rows = add(terms, jnp.array([CHUNK]), ids, coefficients, subkeys=subkeys)
        of_totals, _ = totals(jnp.array([CHUNK]), ids, coefficients, subkeys=subkeys)
    assert sums.shape == (2, CODEBOOKS, subkeys, half)
    one, chosen = by_token(coefficients[CHUNK if of_all else 0]), by_token(ids[CHUNK])
    vectors = queries[CHUNK].reshape(tokens, HEADS, 2, half)
    expected = add_to_sub_keys(one, chosen, vectors, subkeys)
    equal_or_close(sums.sum(0).reshape(expected.shape), expected, ratio=1e-5)
    expected = sub_key_totals(one, chosen, subkeys)
    for actual in (of_rows, of_totals):
        equal_or_close(actual.sum(0).reshape(expected.shape), expected, ratio=1e-6)


@pytest.mark.thorough
def test_memories_of_equal_sizes_share_one_trace():
    queries, weights = draw(CHUNKS, 64, 1, 256), jnp.ones((CHUNKS, 64))
    key_write = KeyWrite(learning_rate=1.0, loss_weight=1.0, score="idw")

    def loss(keys):
        for _ in range(2):  # The loops are made anew for each memory, as a model does.
            find = functools.partial(best_sub_keys, top_k=TOP_K)
            loops = key_loops("gpu", TOP_K)
            keys = key_scan(keys, queries, weights, find, key_write, loops).keys
        return jnp.sum(keys)

    with dispatch.compile_kernels("gpu"):
        jaxpr = jax.make_jaxpr(jax.grad(loss))(draw(1, 2, 128, 128)).jaxpr
    for name in ("_forward", "_scan_back"):
        found = programs(jaxpr, name)
        assert len(found) == 2
        assert len(set(map(id, found))) == 1


@pytest.mark.slow
def test_access_is_summed_from_scores_and_weights():
    tokens, subkeys = 128, 64
    ids, weights = draw_ids(tokens, subkeys), jnp.abs(draw(CHUNKS, tokens))
    scores = -jnp.sort(-draw(CHUNKS, CODEBOOKS, TOP_K, tokens), axis=2)
    with dispatch.interpret_kernels("gpu"):
        sums, shares = totals(jnp.array([CHUNK]), ids, scores, weights, subkeys=subkeys)
    expected = jax.nn.softmax(scores[CHUNK], axis=1)
    equal_or_close(shares, expected, ratio=1e-6)
    expected = sub_key_totals(
        by_token(expected * weights[CHUNK][None, None]), by_token(ids[CHUNK]), subkeys
    )
    equal_or_close(sums.sum(0).reshape(expected.shape), expected, ratio=1e-6)


@pytest.mark.thorough
def test_a_step_moves_the_next_keys_and_splits_them():
    subkeys, half = 3, 8
    history, sums = draw(CHUNKS + 1, CODEBOOKS, subkeys, half), draw(2, CODEBOOKS, subkeys, half)
    of_rows = draw(2, CODEBOOKS, subkeys)

    @jax.jit
    def run(history):
        arrays = history, jnp.zeros((CHUNKS, CODEBOOKS, subkeys))
        refs = [jax.new_ref(x, memory_space=plgpu.GMEM) for x in arrays]
        after = step(*refs, jnp.array([CHUNK]), sums, of_rows, keep=KEEP, move=MOVE)
        return *map(jax.freeze, refs), *after

    with dispatch.interpret_kernels("gpu"):
        moved, kept, terms, norms = run(history)
    equal_or_close(kept[CHUNK], of_rows.sum(0), ratio=1e-6)
    assert not jnp.any(kept[CHUNK + 1])
    keys = history[CHUNK]
    new = KEEP * keys + MOVE * (sums.sum(0) - of_rows.sum(0)[..., None] * keys)
    equal_or_close(moved, history.at[CHUNK + 1].set(new), ratio=1e-6)
    equal_or_close(sum(term.astype(jnp.float32) for term in terms), new, ratio=1e-6)
    equal_or_close(norms, jnp.sum(new**2, axis=-1), ratio=1e-6)


@pytest.mark.slow
def test_the_way_back_of_pulls_and_of_a_step():
    tokens, subkeys, half = 3, 4, 8
    ids, queries = draw_ids(tokens, subkeys), draw(CHUNKS, tokens, CODEBOOKS, half)
    history, bars = (
        draw(CHUNKS, CODEBOOKS, subkeys, half),
        draw(CHUNKS + 1, CODEBOOKS, subkeys, half),
    )
    sums, of_rows = draw(2, CODEBOOKS, subkeys, half), draw(2, CODEBOOKS, subkeys)
    step_totals, chunk = draw(CHUNKS, CODEBOOKS, subkeys), jnp.array([CHUNK])

    @jax.jit
    def run(bars):
        ref = jax.new_ref(bars, memory_space=plgpu.GMEM)
        dots = step_back(ref, chunk, history, step_totals, sums, of_rows, keep=KEEP, move=MOVE)
        return jax.freeze(ref), dots

    with dispatch.interpret_kernels("gpu"):
        products = jnp.sum(history[CHUNK] * bars[CHUNK + 1], axis=-1)
        pulls = pulls_back(queries, chunk, bars, products, ids, move=MOVE)
        stepped, dots = run(bars)
    after, keys = bars[CHUNK + 1], history[CHUNK]
    for codebook, place, token in np.ndindex(CODEBOOKS, TOP_K, tokens):
        one = ids[CHUNK, codebook, place, token]
        gap = queries[CHUNK, token, codebook] - keys[codebook, one]
        expected = MOVE * jnp.sum(gap * after[codebook, one])
        np.testing.assert_allclose(pulls[codebook, place, token], expected, rtol=1e-4)
    gradient = sums.sum(0) - of_rows.sum(0)[..., None] * keys
    new = KEEP * after - MOVE * step_totals[CHUNK][..., None] * after - gradient
    equal_or_close(stepped, bars.at[CHUNK].set(new), ratio=1e-6)
    equal_or_close(dots, jnp.sum(history[CHUNK - 1] * new, axis=-1), ratio=1e-6)


@pytest.mark.slow_cases("3")
@pytest.mark.thorough("3")
@pytest.mark.parametrize("top_k", [TOP_K, 10])
def test_cotangents_of_queries_are_sums_over_the_chosen_sub_keys(top_k):
    tokens, subkeys, half = 5, 12, 8
    every = np.random.default_rng(top_k).random((CHUNKS, tokens, CODEBOOKS, subkeys))
    ids = jnp.asarray(every.argsort(-1)[..., :top_k], jnp.int32)
    queries = draw(CHUNKS, tokens, CODEBOOKS, half)
    keys, bars = (draw(CHUNKS, CODEBOOKS, subkeys, size)[..., :half] for size in (half, half + 1))
    of_steps, pulls = draw(*ids.shape), draw(*ids.shape, 2)[..., 0]
    with dispatch.interpret_kernels("gpu"):
        actual = to_queries(queries, keys, bars, ids, of_steps, pulls)
    chunk, codebook = np.ogrid[:CHUNKS, :CODEBOOKS]
    places = chunk[:, None, :, None], codebook[:, None, :, None], ids
    expected = of_steps[..., None] * bars[places]
    expected += pulls[..., None] * (queries[..., None, :] - keys[places])
    equal_or_close(actual, expected.sum(-2), ratio=1e-6)


@pytest.mark.slow_cases("two_chunks-float32", "two_chunks-bfloat16")
@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", [SPECS[0]], ids=lambda spec: spec.name)
def test_whole_scans_and_their_cotangents_equal_plain_xla(spec, dtype):
    with dispatch.interpret_kernels("gpu"):
        ways = key_loops("gpu", spec.top_k), KeyLoops()
        errors = errors_of(spec, *ways, dtype=dtype)
    assert errors["['ids']"] == 0
    assert max(errors.values()) < CHECK_RATIO, errors


def test_the_check_before_first_use_fills_the_memory_of_queries_again():
    checked = [spec for spec in SPECS if spec.name in CHECKED]
    tiles = [spec.tokens // TILE // gpu_add.splits_of(spec.tokens) for spec in checked]
    assert max(tiles) > gpu_add.SLOTS


KEY_WRITE = KeyWrite(learning_rate=1.0, loss_weight=1.0, score="idw")
SIZES = {"tokens": 64, "subkeys": 128, "half": 128, "top_k": 8}


def chosen_for(sizes=(), dtype=jnp.float32, **write):
    tokens, subkeys, half, top_k = (SIZES | dict(sizes)).values()
    keys, queries = jnp.zeros((1, 2, subkeys, half)), jnp.zeros((2, tokens, 1, 2 * half), dtype)
    key_write = dataclasses.replace(KEY_WRITE, **write)
    return KEY_SCAN.choose("auto", keys, queries, top_k, key_write)


@pytest.mark.parametrize(
    ("sizes", "write", "reason"),
    [
        ({"tokens": 96}, {}, "tokens=96, only multiples of 64"),
        ({"subkeys": 64}, {}, "subkeys=64, only multiples of 128"),
        ({"half": 64}, {}, "half=64, only multiples of 128 up to 320"),
        ({"half": 384}, {}, "half=384"),
        ({"top_k": 32}, {}, "top_k=32; at most 1024 and 16"),
        ({}, {"score": "dot"}, "score=dot"),
        ({}, {"loss_weight": 0.0}, "loss_weight=0.0"),
        ({}, {"dtype": jnp.float16}, "dtypes float16 and float32"),
    ],
)
def test_what_the_kernels_do_not_take_runs_in_plain_xla_and_says_why(sizes, write, reason, caplog):
    with dispatch.interpret_kernels("gpu"), checked_again(), caplog.at_level("INFO"):
        assert chosen_for() == chosen_for(dtype=jnp.bfloat16) == "gpu"
        assert chosen_for(sizes, **write) == "reference"
    assert reason in caplog.text


def test_without_the_kernel_of_the_selection_the_loops_are_plain(monkeypatch):
    monkeypatch.setenv(dispatch.REFERENCE_VARIABLE, "product_top_k")
    with dispatch.interpret_kernels("gpu"):
        assert chosen_for() == "reference"


@pytest.mark.slow
def test_memories_side_by_side_keep_the_plain_loops():
    rule = FwPKM(num_subkeys=128, key_dim=256, value_dim=128, backend="pallas")

    def names(groups):
        tokens = (groups, 1, 128)
        memory = jax.eval_shape(jax.vmap(rule.init), jax.random.split(jax.random.key(0), groups))
        sequence = functools.partial(rule.sequence, chunk_size=64)
        arrays = [jax.ShapeDtypeStruct((*tokens, *x), jnp.float32) for x in ((1, 256), (128,))]
        signals = jax.eval_shape(jax.vmap(sequence), *arrays)
        run = functools.partial(rule.run_groups, chunk_size=64)
        with dispatch.compile_kernels("gpu"):
            return str(jax.make_jaxpr(run)(memory, signals))

    assert "key_scan_step" in names(1)
    assert "key_scan_step" not in names(2)
