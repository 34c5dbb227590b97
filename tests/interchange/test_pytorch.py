"""Exported folders in PyTorch: logits, memories and texts are this package's, whatever the cut."""

import contextlib
import dataclasses
import json
import os
from importlib.util import find_spec

import jax
import numpy as np
import pytest

from fwpkm_jax import FwMLP, load_run, memories
from fwpkm_jax.generation import generate, init_generation
from fwpkm_jax.interchange.hf import export_model
from fwpkm_jax.interchange.hf.pytorch import hybrid_text, unread_memory
from fwpkm_jax.layers.pkm import PKMConfig
from fwpkm_jax.memories.saved import fingerprint
from fwpkm_jax.rules import FwPKM
from tests.interchange.exported_models import (
    FAMILY_MODELS,
    HYBRIDS,
    LENGTH,
    MEMORY,
    VOCAB,
    export,
    family_model,
    loading_in_pytorch,
    streamed,
)
from tests.interchange.make_families import MODELS
from tests.interchange.test_hub import PINNED

PADDING, PROMPT, NEW = 37, 60, 8
CASES = [*MODELS, *FAMILY_MODELS, *HYBRIDS]
RECURRENT = {"qwen3_5", "qwen3_5_moe", "olmo_hybrid"}
"""The library takes a single token as real in these, whatever the mask says."""
ROUNDED = {"qwen3_5": 4e-5, "qwen3_5_moe": 2e-4, "hybrid": 4e-5, "hybrid_other": 4e-5}
"""Of the largest logit, where recurrences are rounded in another order and the differences add up
over 300 tokens, with experts most: found 6.4e-5, else 1.2e-5 to 2.9e-5. In float64 they are at most
1e-13, so that this is rounding."""
IN_FLOAT64 = [*ROUNDED, "qwen2"]
in_pytorch = pytest.mark.extras
needs_torch = pytest.mark.skipif(
    find_spec("torch") is None or find_spec("transformers") is None,
    reason="torch and transformers: not installed",
)


def model_of(name):
    return HYBRIDS[name] if name in HYBRIDS else family_model(name)


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """By a case's name: its configuration, its folder with the run and the export, its weights."""
    made = {}

    def exported(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = (model_of(name), folder, export(model_of(name), folder))
        return made[name]

    return exported


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    with loading_in_pytorch(tmp_path_factory.mktemp("programs")) as loaded:
        yield loaded


def a_batch(seed=0):
    """Tokens and mask `[2, LENGTH]`; the second sequence has padding in front."""
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (2, LENGTH))
    mask = np.ones_like(tokens)
    mask[1, :PADDING] = 0
    return tokens, mask


def read_in_pieces(lm, tokens, mask, cuts, **options):
    """Logits `[batch, length, vocab]` of tokens that are read in pieces, and the cache."""
    import torch

    tokens, mask = torch.tensor(tokens), torch.tensor(mask)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, logits, start = None, [], 0
    for end in [*cuts, tokens.shape[1]]:
        with torch.no_grad():
            out = lm(
                tokens[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                cache=cache,
                use_cache=True,
                **options,
            )
        cache, start = out.cache, end
        logits.append(out.logits.numpy())
    return np.concatenate(logits, axis=1), cache


def difference(actual, expected):
    """The largest, as a share of the largest number."""
    return np.max(np.abs(actual - expected)) / np.max(np.abs(expected))


def assert_near(name, actual, expected, share=1e-5):
    found = difference(actual, expected)
    assert found < share, f"{name} differs by {found:.1e} of the largest"


def fast_weights(state, stream):
    """Names of all keys and values, those of a state in PyTorch, and those of a stream."""
    for name, found in state.layers.items():
        for kind in ("keys", "values"):
            rows = np.stack([getattr(memory, kind).numpy() for memory in found])
            yield f"{name} {kind}", rows, getattr(stream.memory[name], kind)


def assert_same_memories(state, stream, share=1e-5):
    """Fast weights and waiting tokens of a state in PyTorch are those of a stream."""
    assert sorted(state.layers) == sorted(stream.memory)
    for rows in fast_weights(state, stream):
        assert_near(*rows, share)
    for name, found in state.layers.items():
        pending = stream.layers[name].pending
        waiting = [memory.num_waiting for memory in found]
        np.testing.assert_array_equal(waiting, pending.num_waiting)
        for group, count in enumerate(waiting):
            if count:
                of_jax = pending.tokens.value[group, :, :count]
                assert_near(f"{name} waiting", found[group].waiting[1].numpy(), of_jax, share)


def a_batch_with_text(name, lm):
    """The batch, in which greedy texts of the model follow prompts of 60 tokens."""
    import torch

    # With seed 0 rounding decides which sub-key of one token is Qwen2's third: 2.4e-7 apart.
    tokens, mask = a_batch(seed=3 if name == "qwen2" else 0)
    prompt = {"input_ids": tokens[:, :PROMPT], "attention_mask": mask[:, :PROMPT]}
    prompt = {key: torch.tensor(x) for key, x in prompt.items()}
    texts = lm.generate(**prompt, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    tokens[:, : PROMPT + NEW] = texts.numpy()
    return tokens, mask


def greedy(logits):
    """The texts that logits of that batch would have chosen."""
    return logits[:, PROMPT - 1 : PROMPT + NEW - 1].argmax(-1)


@in_pytorch
@needs_torch
@pytest.mark.parametrize("name", CASES)
def test_logits_rows_and_texts_are_this_package_s(name, exports, load):
    """A memory for each sequence, read at once and in pieces; texts follow prompts of 60 tokens."""
    model, folder, weights = exports(name)
    lm = load(folder / "out")
    tokens, mask = a_batch_with_text(name, lm)
    cuts = sorted(np.random.default_rng(1).choice(np.arange(1, LENGTH), 9, replace=False))
    singles = [*range(PADDING if name in RECURRENT else 1, 50)]
    for pieces in ([], cuts, singles):
        logits, _ = read_in_pieces(lm, tokens, mask, pieces)
        if not pieces:
            expected, stream = streamed(model, weights, tokens, mask, groups=2)
            real = mask > 0
        assert_near("logits", logits[real], expected[real], ROUNDED.get(name, 1e-5))
        assert_same_memories(lm.memory_state(), stream, ROUNDED.get(name, 1e-5))
    for layer, memory in stream.memory.items():
        rows = memory.values != np.asarray(weights.memory[layer].values)
        assert np.count_nonzero(rows.any(-1)) > 20
    np.testing.assert_array_equal(tokens[:, PROMPT : PROMPT + NEW], greedy(expected))


@contextlib.contextmanager
def in_float64(lm):
    """The model in float64 while this lasts, also where the library itself casts to float32."""
    import torch

    lm.double()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for path, module in [*lm.named_modules()]:
            if hasattr(module, "rope_type"):  # Tables and scales were rounded when they were made.
                lm.set_submodule(path, type(module)(module.config))
            if hasattr(module, "scalar_embed_scale"):
                module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
        yield lm


@in_pytorch
@needs_torch
@pytest.mark.slow_cases(*(name for name in CASES if name not in IN_FLOAT64))
@pytest.mark.parametrize("name", CASES)
def test_in_float64_logits_and_rows_differ_by_rounding_alone(name, exports, load):
    """So the differences in float32 above are no other computation."""
    model, folder, weights = exports(name)
    tokens, mask = a_batch()
    # The grouped products that the library takes for experts know no float64.
    options = {"experts_implementation": "eager"} if name.endswith("moe") else {}
    with in_float64(load(folder / "out", **options)) as lm:
        logits, _ = read_in_pieces(lm, tokens, mask, [50, 51, 200])
        state = lm.memory_state()
    expected, stream = streamed(model, weights, tokens, mask, groups=2, wide=True)
    assert logits.dtype == expected.dtype == np.float64
    assert_near("logits", logits[mask > 0], expected[mask > 0], 1e-10)
    assert_same_memories(state, stream, 1e-10)


@in_pytorch
@needs_torch
@pytest.mark.parametrize("name", ["qwen2", "hybrid"])
def test_a_batch_that_shares_a_memory_is_read_as_one_group(name, exports, load):
    model, folder, weights = exports(name)
    lm = load(folder / "out")
    tokens, mask = a_batch()
    mask[:, :5] = 0  # Positions where all have padding take no place in the queue.
    expected, stream = streamed(model, weights, tokens, mask, groups=1)
    logits, _ = read_in_pieces(lm, tokens, mask, [3, 8, 100], groups=1)
    assert_near("logits", logits[mask > 0], expected[mask > 0], ROUNDED.get(name, 1e-5))
    assert_same_memories(lm.memory_state(), stream, ROUNDED.get(name, 1e-5))


@in_pytorch
@needs_torch
@pytest.mark.parametrize("name", ["qwen2", "hybrid"])
def test_a_saved_memory_crosses_both_ways(name, exports, load, tmp_path):
    """Also a fork, which stores what differs from its base."""
    import torch

    _, folder, _ = exports(name)
    lm, run = load(folder / "out"), load_run(folder / "run")
    text, question = np.arange(70)[None] % VOCAB, np.array([[3, 1, 4, 1, 5]])
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}

    def asked():
        return lm.generate(torch.tensor(question), **options).numpy()[:, question.shape[1] :]

    def asked_here(memory):
        state = memories.load(tmp_path, memory, run.model, max_length=128)
        return np.asarray(generate(run.model, question, state, max_new_tokens=NEW).tokens)

    with jax.default_matmul_precision("highest"):
        state = init_generation(
            run.model, jax.tree.map(lambda x: x[:1], run.memory), batch=1, max_length=128
        )
        memories.save(tmp_path, "start", state, model=run.model, keep="memory")
        memories.fork(tmp_path, "start", "alice")
        state = generate(run.model, text, state, max_new_tokens=0).state
        memories.save(tmp_path, "alice", state, model=run.model, keep="memory")
        assert memories.describe(tmp_path, "alice").base == "start"
        lm.load_memory(tmp_path / "alice.safetensors")
        assert_same_memories(lm.memory_state(), state.stream)
        from_jax = asked()
        np.testing.assert_array_equal(from_jax, asked_here("alice"))

        lm.forget()
        read_in_pieces(lm, text, np.ones_like(text), [])
        assert_same_memories(lm.memory_state(), state.stream)
        lm.save_memory(tmp_path / "bob.safetensors", note="from PyTorch")
        assert memories.describe(tmp_path, "bob").note == "from PyTorch"
        assert memories.describe(tmp_path, "bob").num_read == (70,)
        np.testing.assert_array_equal(asked_here("bob"), from_jax)
        lm.load_memory(tmp_path / "bob.safetensors")
        np.testing.assert_array_equal(asked(), from_jax)


@in_pytorch
@needs_torch
@pytest.mark.parametrize("name", ["qwen2", "hybrid"])
def test_texts_go_on_from_a_cache_and_need_none(name, exports, load):
    import torch

    _, folder, _ = exports(name)
    lm, tokens = load(folder / "out"), torch.tensor(a_batch()[0])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": VOCAB - 1}
    options["attention_mask"] = torch.ones_like(tokens[:, :40])
    first = lm.generate(tokens[:, :40], return_dict_in_generate=True, **options)
    longer = torch.cat((first.sequences, tokens[:, :20]), 1)
    options["attention_mask"] = torch.ones_like(longer)
    expected = lm.generate(longer, **options)
    for kept in ({"cache": first.cache}, {"use_cache": False}):
        assert torch.equal(lm.generate(longer, **kept, **options), expected)


@in_pytorch
@needs_torch
def test_memories_are_left_alone_read_on_and_begun_again(exports, load):
    import torch

    _, folder, _ = exports("qwen2")
    lm = load(folder / "out")
    tokens, mask = a_batch()
    first, _ = read_in_pieces(lm, tokens, mask, [40], write=False)
    for memory in lm.memory_state().layers["layer_2"]:
        assert memory.num_waiting == 0
        assert memory.values.data_ptr() == lm.memory_layers["layer_2"].values.data_ptr()
    written, _ = read_in_pieces(lm, tokens, mask, [])
    assert np.max(np.abs(written - first)[mask > 0]) > 1e-3
    state = lm.memory_state()
    again, _ = read_in_pieces(lm, tokens, mask, [7])
    np.testing.assert_allclose(again[mask > 0], written[mask > 0], rtol=0, atol=1e-4)
    kept = state.layers["layer_2"][0].values.clone()
    lm.load_memory(state)
    other, _ = read_in_pieces(lm, tokens, mask, [])
    assert np.max(np.abs(other - written)[mask > 0]) > 1e-3
    torch.testing.assert_close(state.layers["layer_2"][0].values, kept, rtol=0, atol=0)
    narrow = load(folder / "out", dtype=torch.bfloat16)
    assert narrow.lm_head.weight.dtype == torch.bfloat16
    out = narrow(torch.tensor(tokens))
    assert out.logits.isfinite().all()
    assert narrow.memory_state().layers["layer_2"][0].values.dtype == torch.float32


@in_pytorch
@needs_torch
def test_what_the_programs_cannot_do_is_refused_by_name(exports, load, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    _, folder, _ = exports("qwen2")
    lm, tokens = load(folder / "out"), torch.tensor(a_batch()[0][:, :9])
    with pytest.raises(NotImplementedError, match="set num_beams=1"):
        lm.generate(tokens, num_beams=2, max_new_tokens=3, pad_token_id=0)
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        lm.generate(tokens[:1], assistant_model=lm, max_new_tokens=3, pad_token_id=0)
    with pytest.raises(ValueError, match="has 4 axes"):
        lm(tokens, attention_mask=torch.ones(2, 1, 9, 9))
    with pytest.raises(ValueError, match="3 memories for 2 sequences"):
        lm(tokens, groups=3)
    plain = AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32)
    cache = DynamicCache(config=plain.config)
    plain(tokens, cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="filled without memories"):
        lm(tokens, cache=cache)
    cache = lm(tokens, use_cache=True).cache
    with pytest.raises(ValueError, match="1 sequences, and the memories are of 2"):
        lm(tokens[:1], cache=cache)
    lm.load_memory(lm.memory_state())
    with pytest.raises(ValueError, match="1 memories for 2 sequences, beginning with 2"):
        lm(tokens, groups=1)
    lm.forget()
    lm(tokens[:1])
    lm.load_memory(lm.memory_state())
    with pytest.raises(ValueError, match="groups=1 of 2 sequences: tokens of 1 a memory wait"):
        lm(tokens, groups=1)
    lm.save_memory(tmp_path / "a.safetensors")
    content = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(content[:-4] + b"\0\0\1\0")
    with pytest.raises(ValueError, match=r"b\.safetensors is damaged"):
        lm.load_memory(tmp_path / "b.safetensors")
    _, other, _ = exports("mistral")
    with pytest.raises(ValueError, match="belongs to other weights"):
        load(other / "out").load_memory(tmp_path / "a.safetensors")
    with pytest.raises(NotImplementedError, match="Copy the exported folder"):
        lm.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"call model\.eval"):
        lm.train()(tokens)


@pytest.mark.slow
def test_a_folder_has_programs_a_card_and_a_note(exports):
    _, folder, _ = exports("hybrid")
    out = folder / "out"
    text = json.loads((out / "config.json").read_text())
    assert text["model_type"] == "fwpkm"
    assert text["auto_map"]["AutoConfig"] == "modeling_fwpkm_hybrid.FwPKMConfig"
    assert text["fwpkm_jax"]["weights"] == fingerprint(load_run(folder / "run").model)
    programs = {x.name for x in out.glob("*.py")}
    assert programs == {"modeling_fwpkm.py", "modeling_fwpkm_hybrid.py"}
    for name in programs:
        assert (out / name).read_text().count("\n") <= 450
    card = (out / "README.md").read_text()
    head = card.split("---")[1]
    assert 'pipeline_tag: "text-generation"' in head
    assert 'from_pretrained("out", trust_remote_code=True)' in card
    assert os.fspath(folder) not in card
    assert "fwpkm import hf" not in card  # No family of the library has such a model.


@pytest.mark.slow
def test_a_card_has_the_licence_and_the_results(exports, tmp_path):
    _, folder, _ = exports("hybrid")
    record = json.loads(PINNED.read_text())["recall"]["record"]
    results = folder / "run" / "results"
    results.mkdir()
    (results / "recall.json").write_text(json.dumps(record))
    export_model(folder / "run", tmp_path / "out", license_name="mit", say=lambda _: None)
    head = (tmp_path / "out" / "README.md").read_text().split("---")[1]
    assert 'license: "mit"' in head
    (index,) = (line for line in head.splitlines() if line.startswith("model-index: "))
    (model,) = json.loads(index.removeprefix("model-index: "))
    for result, memory in zip(model["results"], ("writing", "frozen"), strict=True):
        (metric,) = result["metrics"]
        assert metric["name"] == f"accuracy, memory {memory}"
        assert metric["value"] == record["results"][memory]["all"]["accuracy"]


def test_memories_and_layers_that_the_programs_lack_are_named():
    hybrid = HYBRIDS["hybrid"]
    for changes, message in (
        ({"expert_layers": (0,)}, r"model\.expert_layers=\(0,\)"),
        ({"head_bias": True}, r"model\.head_bias=True"),
        ({"mixers": ("titans", "swa", "swa", "gdn")}, "a layer with .*Titans"),
        ({"pkm": PKMConfig(query_norm=False, query_batch_norm=True)}, "query_batch_norm=True"),
        (
            {"fast_weight": dataclasses.replace(MEMORY, rule=FwPKM(inner_steps=2))},
            r"rule\.inner_steps=2",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            hybrid_text(dataclasses.replace(hybrid, **changes), context=64)
    dense = dataclasses.replace(hybrid, fast_weight=dataclasses.replace(MEMORY, rule=FwMLP()))
    assert unread_memory(dense, "qwen3") == "memories of FwMLP"
    assert unread_memory(hybrid, "gemma3") == "the memories of a gemma3 with images"
