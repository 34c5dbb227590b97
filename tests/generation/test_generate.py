"""Generation against the whole pass, and against reading one token after another by hand."""

import functools
import importlib
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax import memories
from fwpkm_jax.generation import Sampling, generate, init_generation
from fwpkm_jax.generation.generate import Reading, decode
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers.lact import LaCTConfig
from fwpkm_jax.layers.mixers.titans_config import TitansConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.rules import FwMLP, FwPKM
from tests.memories.models import EVERY, make_model
from tests.models.test_language_model import CONFIG

CHUNK = CONFIG.fast_weight.chunk_size
SMALL = replace(CONFIG, mixers=("swa",), memory_layers=(0,), pkm_layers=())
# Without lookahead streams write the same pairs as whole passes.
RULE = replace(CONFIG.fast_weight.rule, lookahead=0)
MODELS = {
    "every_mixer_fwpkm_pkm": replace(
        CONFIG,
        mixers=("gdn", "swa", "attention", "lact"),
        memory_layers=(1,),
        lact=LaCTConfig(
            num_heads=2, num_fast_heads=1, hidden_dim=4, chunk_size=3, window=4, low_rank=2
        ),
        fast_weight=FastWeightConfig(rule=RULE, chunk_size=CHUNK),
    ),
    "titans": replace(
        SMALL,
        mixers=("titans_mac", "titans_mag", "titans_mal"),
        memory_layers=(),
        titans=TitansConfig(
            **{"num_heads": 1, "head_dim": CONFIG.model_dim, "depth": 1, "max_rate": 1.0},
            **{"residual_norm": False, "chunk_size": 5, "num_persistent": 2},
        ),
    ),
    "fwmlp": replace(
        SMALL,
        fast_weight=FastWeightConfig(
            rule=FwMLP(key_dim=6, value_dim=6, hidden_dim=5, lookahead=0), chunk_size=CHUNK
        ),
    ),
}


@functools.cache
def build(config):
    return LanguageModel(config, rngs=nnx.Rngs(0))


def start(config=SMALL, *, batch, groups, max_length=32):
    model = build(config)
    memory = model.init_memory(jax.random.key(1), groups=groups)
    return model, memory, init_generation(model, memory, batch=batch, max_length=max_length)


def prompts(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, CONFIG.vocab_size, length) for length in lengths]


def assert_close(actual, expected, tolerance=2e-5):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance),
        actual,
        expected,
    )


@pytest.mark.thorough("every_mixer_fwpkm_pkm-True")
@pytest.mark.slow_cases("titans-True", "fwmlp-True")
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("every_mixer_fwpkm_pkm", True),
        ("titans", True),
        ("fwmlp", True),
        ("fwmlp", False),
    ],
)
def test_generation_equals_the_whole_pass_token_by_token(name, write, tmp_path):
    model, memory, state = start(MODELS[name], batch=2, groups=1)
    prompt = np.stack(prompts(7, 7))
    out = generate(model, prompt, state, max_new_tokens=5, write=write)
    sequence = jnp.concatenate([jnp.asarray(prompt, jnp.int32), out.tokens], axis=1)
    assert sequence.shape[1] % CHUNK == 0  # The whole pass writes a short last chunk too.
    graphdef, params = nnx.split(model)
    whole = jax.jit(lambda params: nnx.merge(graphdef, params)(sequence, memory, write=write))
    whole = whole(params)
    np.testing.assert_array_equal(out.tokens, np.argmax(whole.logits[:, 6:-1], axis=-1))
    log_probs = jax.nn.log_softmax(whole.logits[:, 6:-1], axis=-1)
    chosen = np.take_along_axis(np.asarray(log_probs), np.asarray(out.tokens)[..., None], axis=-1)
    # Steps of a network's gradients magnify rounding.
    tolerance = 1e-4 if name == "titans" else 2e-5
    assert_close(out.log_probs, chosen[..., 0], tolerance)
    assert_close(out.state.logits, whole.logits[:, -1], tolerance)
    assert_close(out.state.stream.memory, whole.memory, tolerance)
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), whole.memory, memory)
    assert any(jax.tree.leaves(changed)) == (write and bool(memory))
    np.testing.assert_array_equal(out.lengths, [5, 5])
    np.testing.assert_array_equal(out.state.num_read, [12, 12])
    _, _, state = start(MODELS[name], batch=2, groups=1)
    assert_goes_on_from_kept_and_saved_states(model, prompt, state, out, tmp_path, write=write)


def assert_goes_on_from_kept_and_saved_states(model, prompt, state, unbroken, folder, *, write):
    """Bit for bit as the unbroken conversation, with its programs, while tokens wait."""
    state = generate(model, prompt, state, max_new_tokens=0, write=write).state
    memories.save(folder, "alice", state, model=model)
    go_on = functools.partial(generate, model, None, max_new_tokens=5, write=write)
    once = go_on(state, keep_state=True)
    unwritten = jax.tree.map(lambda a, b: a is b, once.state.stream.memory, state.stream.memory)
    assert all(jax.tree.leaves(unwritten)) or write, "what is not written is not copied"
    restored = go_on(memories.load(folder, "alice", model))
    for other in (once, restored, go_on(state)):
        jax.tree.map(np.testing.assert_array_equal, other, unbroken)


@pytest.mark.slow
def test_every_registered_mixer_goes_on_from_kept_and_saved_states(tmp_path):
    """Seen by default for the mixers of `MODELS`; most others are recurrences as gdn is."""
    model = make_model(EVERY)
    memory = model.init_memory(jax.random.key(1))
    begin = functools.partial(init_generation, model, memory, batch=2, max_length=32)
    prompt = np.stack(prompts(7, 7))
    unbroken = generate(model, prompt, begin(), max_new_tokens=5)
    assert_goes_on_from_kept_and_saved_states(
        model, prompt, begin(), unbroken, tmp_path, write=True
    )


@pytest.mark.slow
def test_a_draft_is_thrown_away_and_no_table_is_copied():
    model, memory, _ = start(MODELS["fwmlp"], batch=1, groups=1)
    state = init_generation(model, memory, batch=1, max_length=32, max_chunk_size=CHUNK + 1)
    state = state._replace(num_read=state.num_read + 1)  # As if a token had been read.
    draft = generate(model, None, state, max_new_tokens=3, chunk_size="flush", keep_state=True)
    tables = jax.tree.map(lambda a, b: a is b, draft.state.stream.memory, state.stream.memory)
    assert all(jax.tree.leaves(tables))
    assert draft.state.stream.layers["layer_0"].pending.num_waiting.tolist() == [3]
    with pytest.raises(ValueError, match=r"layer_0 has room for 2 more waiting tokens, not 3"):
        generate(model, None, draft.state, max_new_tokens=3, chunk_size="flush")
    draft = jax.device_get(draft)  # It shares the tables, which the next call takes over.
    out = generate(model, None, state, max_new_tokens=3)  # Its chunk is not complete yet.
    np.testing.assert_array_equal(out.tokens, draft.tokens)
    assert_close(out.state, draft.state, 1e-6)


@functools.partial(jax.jit, static_argnames="write")
def read_one(token, stream, *, write):
    return build(SMALL).stream(token[None, None], stream, write=write)


def by_hand(prompt, length, *, stop_id, write):
    """One sequence alone, one token after another."""
    model = build(SMALL)
    memory = model.init_memory(jax.random.key(1))
    stream = model.init_stream(memory, batch=1, max_length=32)
    tokens, out = [], None
    for step in range(len(prompt) + length):
        if step >= len(prompt):
            tokens.append(int(np.argmax(out.logits[0, 0])))
        if tokens[:-1] and tokens[-2] == stop_id:
            tokens.pop()
            break
        token = prompt[step] if step < len(prompt) else tokens[-1]
        out = read_one(jnp.asarray(token, jnp.int32), stream, write=write)
        stream = out.stream
    return tokens, out


@pytest.mark.thorough
@pytest.mark.slow_cases("3-True")
@pytest.mark.parametrize(("groups", "write"), [(3, True), (1, False)])
def test_prompts_of_any_lengths_give_what_each_gives_alone(groups, write):
    """With a memory each, or one that is not written; up to the stop token of each."""
    rows = prompts(2, 9, 5)
    (first, _), _, _ = alone = [by_hand(row, 6, stop_id=None, write=write) for row in rows]
    stop_id = first[2]
    alone = [by_hand(row, 6, stop_id=stop_id, write=write) for row in rows]
    lengths = [len(tokens) for tokens, _ in alone]
    assert min(lengths) < max(lengths) == 6, "the example shows both ends"
    model, _, state = start(batch=3, groups=groups)
    out = generate(
        model,
        rows,
        state,
        max_new_tokens=6,
        sampling=Sampling(stop_ids=[stop_id]),
        write=write,
        piece_length=4,
    )
    np.testing.assert_array_equal(out.lengths, lengths)
    np.testing.assert_array_equal(out.state.num_drawn, lengths)  # Stopped rows draw no more.
    for row, (tokens, last) in enumerate(alone):
        np.testing.assert_array_equal(out.tokens[row, : len(tokens)], tokens)
        assert np.all(out.tokens[row, len(tokens) :] == -1)
        assert np.all(out.log_probs[row, len(tokens) :] == 0)
        assert out.state.finished[row] == (tokens[-1] == stop_id)
        assert out.state.num_read[row] == len(rows[row]) + len(tokens)
        assert_close(out.state.logits[row], last.logits[0, 0])
        group = row if groups > 1 else 0
        of_row = functools.partial(jax.tree.map, lambda x, group=group: x[group])
        memory, pending = out.state.stream.memory, out.state.stream.layers["layer_0"].pending
        waiting = last.stream.layers["layer_0"].pending.num_waiting[0]
        assert_close(of_row(memory), jax.tree.map(lambda x: x[0], last.stream.memory))
        assert pending.num_waiting[group] == waiting


@pytest.mark.slow
def test_a_call_cut_in_two_gives_what_one_gives():
    sampling = Sampling(temperature=0.9, top_k=9, top_p=0.95, stop_ids=[5])
    run = functools.partial(generate, sampling=sampling, rng=jax.random.key(3))
    rows = prompts(3, 4, 6)

    def in_calls(lengths, **options):
        model, _, state = start(batch=3, groups=1)
        given, outputs = rows, []
        for length in lengths:
            out = run(model, given, state, max_new_tokens=length, **options)
            outputs.append(out)
            state, given = out.state, None
        tokens = np.concatenate([out.tokens for out in outputs], axis=1)
        return tokens, sum(out.lengths for out in outputs), state

    tokens, lengths, state = in_calls([8])
    cut_tokens, cut_lengths, cut_state = in_calls([4, 4])
    np.testing.assert_array_equal(cut_tokens, tokens)
    np.testing.assert_array_equal(cut_lengths, lengths)
    assert_close(cut_state, state, 1e-6)
    assert np.any(in_calls([8], rng=jax.random.key(4))[0] != tokens)
    assert len({tuple(row) for row in tokens.tolist()}) == 3


@pytest.mark.slow
def test_a_finished_sequence_goes_on_with_a_new_prompt():
    model, _, state = start(batch=1, groups=1)
    (row,) = prompts(2)
    first = by_hand(row, 1, stop_id=None, write=True)[0][0]
    out = generate(model, [row], state, max_new_tokens=4, sampling=Sampling(stop_ids=[first]))
    assert out.lengths.tolist() == [1]
    assert bool(out.state.finished[0])
    still = generate(model, None, out.state, max_new_tokens=4, sampling=Sampling(stop_ids=[first]))
    assert still.lengths.tolist() == [0]
    again = generate(model, [row], still.state, max_new_tokens=4)
    whole = [*row, first, *row]
    np.testing.assert_array_equal(again.tokens[0], by_hand(whole, 4, stop_id=None, write=True)[0])


@pytest.mark.thorough
def test_each_token_has_a_draw_and_a_sequence_without_a_prompt_keeps_its_logits():
    model, _, state = start(replace(SMALL, mixers=("retnet",), memory_layers=()), batch=2, groups=1)
    rows, flat = prompts(3, 4), Sampling(temperature=1e4)
    out = generate(model, rows, state, max_new_tokens=6, sampling=flat, rng=jax.random.key(0))
    assert all(len(set(row)) > 1 for row in out.tokens.tolist()), "all tokens by one draw"
    before = np.asarray(out.state.logits)
    after = generate(model, [[], rows[1]], out.state, max_new_tokens=0).state.logits
    np.testing.assert_array_equal(after[0], before[0])
    assert np.any(after[1] != before[1])


@pytest.mark.thorough
def test_other_lengths_of_prompts_and_answers_compile_nothing(caplog):
    model, _, state = start(replace(SMALL, mixers=("attention",)), batch=1, groups=1, max_length=99)
    options = {"sampling": Sampling(stop_ids=[0]), "piece_length": 8}
    # A piece with padding, and whole ones.
    state = generate(model, prompts(9), state, max_new_tokens=3, **options).state
    with jax.log_compiles():
        for length, new in ((7, 5), (10, 1), (16, 2), (21, 6)):
            out = generate(model, prompts(length), state, max_new_tokens=new, **options)
            assert out.tokens.shape == (1, new)
            state = out.state
    assert [record.message for record in caplog.records] == []


@pytest.mark.slow
def test_weights_that_were_put_onto_a_device_compile_each_program_once(caplog, tmp_path):
    """As those of a checkpoint: what a program returns lies there, and so does the first state."""
    config = replace(SMALL, mixers=("attention",))
    graphdef, params = nnx.split(build(config))
    model = nnx.merge(graphdef, jax.device_put(params, jax.devices()[0]))
    memory = model.init_memory(jax.random.key(1), groups=1)
    compiled, state = [], None
    with jax.log_compiles():
        for start in ("new", "again", "loaded"):
            caplog.clear()
            if start == "loaded":
                memories.save(tmp_path, "user", state, model=model)
                state = memories.load(tmp_path, "user", model)
            else:
                state = init_generation(model, memory, batch=1, max_length=64)
            for _ in range(2):
                state = generate(model, prompts(8), state, max_new_tokens=2, piece_length=8).state
            found = re.findall(r"Finished XLA compilation of jit\((_prefill|decode)\)", caplog.text)
            compiled.append(found)
    assert compiled == [["_prefill", "decode"], [], []]


@pytest.mark.slow
def test_an_answer_of_several_blocks_is_that_of_one(monkeypatch):
    def answers():
        model, _, state = start(batch=2, groups=2)
        return generate(
            model, prompts(3, 9), state, max_new_tokens=7, sampling=Sampling(stop_ids=[0])
        )

    whole = answers()
    module = importlib.import_module("fwpkm_jax.generation.generate")  # Not the function.
    monkeypatch.setattr(module, "NEW_AT_ONCE", 3)
    jax.clear_caches()
    cut = answers()
    np.testing.assert_array_equal(cut.tokens, whole.tokens)
    np.testing.assert_array_equal(cut.lengths, whole.lengths)
    assert_close(cut.log_probs, whole.log_probs)
    jax.clear_caches()


@pytest.mark.slow
def test_a_decoding_loop_copies_no_table():
    """The table of 40 x 40 slots stays where it is, from call to call and token to token."""
    rule = FwPKM(num_subkeys=40, key_dim=8, value_dim=6, top_k=3)
    config = replace(SMALL, fast_weight=FastWeightConfig(rule=rule, chunk_size=CHUNK))
    model, _, state = start(config, batch=1, groups=1)
    graphdef, params = nnx.split(model)
    text = decode.lower(
        *(graphdef, params, state, jax.random.key(0), np.int32(4)),
        **{"sampling": Sampling(), "ragged": False, "reading": Reading()},
    )
    lines = text.compile().as_text().splitlines()
    tables = [line for line in lines if "1600,6]" in line]
    assert tables
    assert [line for line in tables if " copy(" in line or " copy-start(" in line] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [[1]]}, "1 prompts for a state of 2"),
        ({"prompts": [[1], [17]]}, r"prompts\[1\] holds 17, not one of 17 ids"),
        ({"prompts": [[1], [[1]]]}, r"prompts\[1\] has shape \(1, 1\)"),
        ({"prompts": [[1], [0.5]]}, r"prompts\[1\] has shape \(1,\) and dtype float64"),
        ({"prompts": [[1], []]}, "Sequence 1 has no token to continue from"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"sampling": Sampling(stop_ids=[17])}, r"stop_ids=\(17,\) must lie between 0 and 16"),
        ({"sampling": Sampling(temperature=1.0)}, "temperature=1.0 draws tokens; give rng"),
        ({"max_new_tokens": 8}, r"keeps max_length=8 tokens, and a sequence may reach 9"),
    ],
)
def test_what_cannot_be_generated_is_refused(changes, message):
    model, _, state = start(replace(SMALL, mixers=("attention",)), batch=2, groups=1, max_length=8)
    arguments = {"prompts": [[1], [2]], "state": state, "max_new_tokens": 1} | changes
    with pytest.raises(ValueError, match=message):
        generate(model, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("stop_ids", [(), (3,)])
def test_a_memory_that_is_not_finite_ends_its_sequence_and_no_other(stop_ids):
    """Of two users' memories in one batch one holds NaN."""
    model, memory, state = start(batch=2, groups=2)
    rows = prompts(7, 4)
    options = {"max_new_tokens": 9, "sampling": Sampling(stop_ids=stop_ids)}
    sound = generate(model, rows, state, **options)
    assert not np.any(sound.failed)
    broken = jax.tree.map(lambda x: x.at[0].set(jnp.nan), memory)
    state = init_generation(model, broken, batch=2, max_length=32)
    out = generate(model, rows, state, **options)
    np.testing.assert_array_equal(out.failed, [True, False])
    np.testing.assert_array_equal(out.lengths, [0, sound.lengths[1]])
    np.testing.assert_array_equal(out.tokens[0], [-1] * 9)
    np.testing.assert_array_equal(out.tokens[1], sound.tokens[1])
    np.testing.assert_array_equal(out.log_probs[1], sound.log_probs[1])
    for leaf, expected in zip(
        jax.tree.leaves(out.state.stream.memory),
        jax.tree.leaves(sound.state.stream.memory),
        strict=True,
    ):
        np.testing.assert_array_equal(leaf[1], expected[1])
