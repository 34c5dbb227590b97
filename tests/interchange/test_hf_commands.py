"""The commands from an open model's folder to a memory in it, on a random tiny model."""

import dataclasses
import io
import json
import math
import os
import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from benchmarks.paper.parameters import count_parameters
from fwpkm_jax import load_config
from fwpkm_jax.cli import program
from fwpkm_jax.data.tokenizers import load_tokenizer
from fwpkm_jax.generation import generate, init_generation
from fwpkm_jax.interchange import start_run
from fwpkm_jax.interchange.hf import model_config, open_folder, read_weights
from fwpkm_jax.interchange.hf.described import changes, config_text
from fwpkm_jax.interchange.hf.families import FAMILIES
from fwpkm_jax.interchange.hf.layout import parts
from fwpkm_jax.interchange.weights import abstract_weights
from fwpkm_jax.io.atomic import write_json
from fwpkm_jax.layers import (
    AttentionConfig,
    ExpertsConfig,
    FastWeightLayerConfig,
    GatedDeltaNetConfig,
    Llama3Scaling,
    YarnConfig,
)
from fwpkm_jax.memories import describe
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.run import load_run

NEXT = {
    "model_type": "qwen3_next", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "linear_key_head_dim": 4,
    "linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8, "mlp_only_layers": [0], "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(NEXT))
    rng, tensors = np.random.default_rng(0), {}
    for part in parts(model_config(NEXT), FAMILIES[NEXT["model_type"]]).values():
        for name, shape in zip(part.names, part.shapes, strict=True):
            tensors[name] = rng.normal(0, 0.5, shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.slow
def test_generation_of_padded_prompts_is_what_whole_passes_choose(folder):
    source = open_folder(folder)
    graphdef = nnx.split(
        nnx.eval_shape(lambda: LanguageModel(source.config, rngs=nnx.Rngs(0), dtype=None))
    )[0]
    model = nnx.merge(graphdef, read_weights(source).params)
    prompts = [np.arange(3, 12), np.arange(50, 54)]
    with jax.default_matmul_precision("highest"):
        state = init_generation(model, {}, batch=2, max_length=32)
        out = generate(model, prompts, state, max_new_tokens=6)
        length = len(prompts[0]) + 6
        pairs = zip(prompts, np.asarray(out.tokens), strict=True)
        rows = [[*prompt, *new] for prompt, new in pairs]
        tokens = jnp.asarray([row + [0] * (length - len(row)) for row in rows], jnp.int32)
        logits = np.asarray(nnx.jit(lambda m, t: m(t, {}).logits)(model, tokens))
    for row, prompt, new in zip(logits, prompts, np.asarray(out.tokens), strict=True):
        np.testing.assert_array_equal(np.argmax(row[len(prompt) - 1 :][:6], axis=-1), new)


@pytest.mark.parametrize(
    ("model_type", "billions"), [("qwen3_5_text", 8.954), ("qwen3_next", 79.674)]
)
def test_the_tensors_asked_for_are_the_parameters_of_the_published_models(model_type, billions):
    """Qwen3.5-9B without its vision tower and multi-token head, and Qwen3-Next-80B-A3B."""
    config = model_config({"model_type": model_type})
    needed = parts(config, FAMILIES[model_type]).values()
    total = sum(math.prod(shape) for part in needed for shape in part.shapes)
    assert round(total / 1e9, 3) == billions


@pytest.mark.slow
def test_counts_are_those_of_the_published_models():
    nine = count_parameters(model_config({"model_type": "qwen3_5_text"}))
    assert round(nine.total / 1e9, 2) == 8.95
    assert nine.total == nine.active
    eighty = count_parameters(model_config({"model_type": "qwen3_next"}))
    assert round(eighty.total / 1e9, 1) == 79.7
    assert round(eighty.active / 1e9, 1) == 3.9


OURS = ModelConfig(
    vocab_size=257, model_dim=16, mlp_dim=24, mixers=("gdn", "attention"), tie_embeddings=False,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
    gdn=GatedDeltaNetConfig(
        num_key_heads=2, num_value_heads=4, key_head_dim=4, value_head_dim=4, conv_width=4
    ),
)  # fmt: skip
"""A model that began here."""


def changed(**fields):
    return dataclasses.replace(OURS, **fields)


def attending(**fields):
    return dataclasses.replace(OURS.attention, gated=False, **fields)


OTHERS = {
    "qwen3_next": changed(
        expert_layers=(1,), experts=ExpertsConfig(num_experts=4, top_k=2, shared_dim=8)
    ),
    "qwen3": changed(
        mixers=("swa", "attention"), window=9, norm_offset=False, mlp_activation="gelu_tanh",
        attention=attending(rotary_fraction=1.0, norm_offset=False, yarn=YarnConfig(factor=2.0)),
    ),
    "olmo_hybrid": changed(
        post_norm_layers=(1,), norm_offset=False,
        attention=attending(qk_norm="all", rotary_fraction=0.0, norm_offset=False),
        gdn=dataclasses.replace(OURS.gdn, max_strength=2.0, norm_eps=1e-5),
    ),
    "llama": changed(
        mixers=("attention",), norm_offset=False, mlp_bias=True, tie_embeddings=True,
        attention=attending(
            qk_norm="none", norm_offset=False, bias=True, rotary_fraction=1.0,
            llama3=Llama3Scaling(factor=4.0, original_length=64),
        ),
    ),
}  # fmt: skip


def test_a_model_that_began_here_is_described_as_a_family_that_computes_the_same():
    for model_type, model in {"qwen3_5_text": OURS, **OTHERS}.items():
        text = config_text(model, context=64)
        assert text["model_type"] == model_type
        assert changes(model_config(text), model) == []
    paper = {name: load_config(name).model for name in ("gdn_fa", "fa__fwpkm2_6_10", "gdn")}
    for model in paper.values():
        assert config_text(model, context=64)["model_type"] == "qwen3_5_text"
    for model, reason in (
        (changed(mixers=("gdn", "swa")), "layer_types holds 'sliding_attention'"),
        (changed(mixers=("titans",)), "layer_types holds 'titans'"),
        (changed(pkm_layers=(0,)), r"qwen3_5_text, the closest: model\.pkm_layers"),
        (changed(head_bias=True), r"model\.head_bias"),
        (changed(fast_weight_layer=FastWeightLayerConfig()), r"model\.fast_weight_layer"),
    ):
        with pytest.raises(ValueError, match=reason):
            config_text(model, context=64)


@pytest.mark.slow
def test_a_run_that_began_here_leaves_as_a_folder_and_is_imported_again(tmp_path, capsys):
    experiment = load_config("books_tiny")
    run = tmp_path / "run"
    experiment = dataclasses.replace(experiment, model=OURS, run_dir=str(run))
    like = abstract_weights(OURS)
    rng = np.random.default_rng(0)
    arrays = {n: rng.normal(0, 0.3, x.shape).astype(x.dtype) for n, x in like.named().items()}
    start_run(experiment, like.replaced(arrays))
    out = str(tmp_path / "out")
    assert program.main(["export", "hf", str(run), out]) == 0
    source = open_folder(out)
    assert changes(source.config, OURS) == []
    for name, array in read_weights(source).named().items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)
    refused = dataclasses.replace(experiment, model=changed(head_bias=True))
    write_json(run / "config.json", refused.to_json())
    assert program.main(["export", "hf", str(run), f"{out}2"]) == 2
    assert "model.head_bias" in capsys.readouterr().err


@pytest.mark.slow
def test_an_export_says_which_tokenizer_is_meant_and_what_a_model_without_attention_needs(
    tmp_path, capsys, monkeypatch
):
    """As the paper's configurations have them: the tokenizer by name, Gated DeltaNet alone."""
    base = load_config("books_tiny")
    model = changed(mixers=("gdn", "gdn"), memory_layers=())
    run = tmp_path / "run"

    def exported(name, tokenizer):
        data = dataclasses.replace(base.data, tokenizer=tokenizer, needles=None)
        experiment = dataclasses.replace(base, model=model, data=data, run_dir=str(run))
        write_json(run / "config.json", experiment.to_json())
        assert program.main(["export", "hf", str(run), str(tmp_path / name)]) == 0
        return tmp_path / name, capsys.readouterr().out

    like = abstract_weights(model)
    ones = like.replaced({n: np.full(x.shape, 0.1, x.dtype) for n, x in like.named().items()})
    start_run(dataclasses.replace(base, model=model, run_dir=str(run)), ones)
    capsys.readouterr()

    pytest.importorskip("mistral_common")
    folder, said = exported("found", "mistral-v1")
    assert "is the run's tokenizer, 'mistral-v1', that of Mistral-7B-v0.1" in said
    assert "call the model there with use_cache=False" in said
    read = load_tokenizer(str(folder / "tokenizer.model"))
    assert read.fingerprint == load_tokenizer("mistral-v1").fingerprint

    def missing():
        raise ImportError("it is not installed")

    monkeypatch.setattr("fwpkm_jax.interchange.hf.exported.mistral_v1_model", missing)
    folder, said = exported("named", "mistral-v1")
    assert "put its tokenizer.model into the folder, or install mistral-common" in said
    assert not (folder / "tokenizer.model").exists()
    folder, said = exported("gone", str(tmp_path / "tokenizer.json"))
    assert "is not there any more; put it into the folder" in said
    # A received configuration may name any file of its reader's.
    (tmp_path / "credentials").write_text("secret")
    for path in ("credentials", "credentials.json"):
        (tmp_path / path).write_text('{"secret": 1}')
        with pytest.raises(AssertionError):
            exported("leaked", str(tmp_path / path))
        assert capsys.readouterr().err.count("\n") == 1
        assert not (tmp_path / "leaked").exists()
    monkeypatch.setattr("fwpkm_jax.interchange.hf.exported.load_tokenizer", lambda _: missing())
    folder, said = exported("unseen", str(tmp_path / "credentials"))
    assert "is not looked at (it is not installed); put it into the folder" in said
    assert not (folder / "credentials").exists()
    model = OURS  # With attention the line is not needed.
    assert {*config_text(model, context=64)["layer_types"]} != {"linear_attention"}


@pytest.mark.thorough("-link-is a link")
@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("", "link", "is a link"),
        ("", "file", "is no folder"),
        ("", "dangling", "is a link"),
        ("chat_template.jinja", "link", "is a link"),
        ("chat_template.jinja", "dangling", "is a link"),
        ("chat_template.jinja", "device", "is a link"),
        ("chat_template.jinja", "pipe", "is no file of bytes on a disk"),
        ("chat_template.jinja", "folder", "is a directory"),
        ("chat_template.jinja", "large", "bytes, and at most"),
        ("config.json", "link", "is a link"),
        ("tensors.json", "pipe", "is no file of bytes on a disk"),
        ("hub.json", "link", "is a link"),
    ],
)
def test_an_export_takes_plain_files_of_a_received_run_only(
    name, kind, message, folder, tmp_path, capsys
):
    outside, run = tmp_path / "outside", tmp_path / "run"
    assert program.main(["import", "hf", str(folder), str(run)]) == 0
    path = run / "hf" / name
    shutil.copytree(run / "hf", outside) if not name else outside.write_text("{}")
    shutil.rmtree(path) if not name else path.unlink(missing_ok=True)
    match kind:
        case "link":
            path.symlink_to(outside)
        case "dangling":
            path.symlink_to(tmp_path / "absent")
        case "device":
            path.symlink_to("/dev/zero")
        case "file":
            path.write_text("{}")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "large":
            with path.open("wb") as file:
                file.truncate(3 * 2**30)
    capsys.readouterr()
    assert program.main(["export", "hf", str(run), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert f"{path} " in said
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "open_model.md"
SMALLER = {
    "--add_memory": [
        "--model.fast_weight.rule.num_subkeys", "8", "--model.fast_weight.chunk_size", "8"
    ],
    "--data.length": ["16"], "--training.batch_size": ["2"], "--training.steps": ["1"],
    "--ppl.max_tokens": ["20"], "--max_new_tokens": ["3"],
}  # fmt: skip
"""Values of the page's options for the model above."""


def page_commands() -> list[list[str]]:
    """The commands of the tutorial, with values of options for a model of two layers."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    commands, used = [], set()
    for line in "".join(blocks).replace("\\\n", "").splitlines():
        words, skip = [], False
        for word in shlex.split(line):
            if word.startswith("--"):
                skip = word in SMALLER
                words += [word, *SMALLER[word]] if skip else [word]
                used |= {word} & SMALLER.keys()
            elif not skip:
                words.append(word)
        commands.append(words)
    assert used == SMALLER.keys()
    return commands


def save_tokenizer(folder):
    """A tokenizer of bytes with an end of text, and a template that puts it after each message."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)


@pytest.fixture
def run_page(folder, tmp_path, monkeypatch, capsys):
    """Runs the tutorial's commands in a new folder; what each has said, by its first words."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "Qwen3-0.6B")
    save_tokenizer(Path("Qwen3-0.6B"))
    Path("texts").mkdir()
    Path("texts", "a.txt").write_text("Alice has a cat. It sleeps on the stairs. " * 20)
    Path("notes.txt").write_text("My cat is called Tom.")
    monkeypatch.setattr("sys.stdin", io.StringIO("Where is it?\n/memory\n/quit\n"))

    def run():
        said = {}
        for command in page_commands():
            assert command[0] == "fwpkm"
            assert program.main(command[1:]) == 0, capsys.readouterr().err
            said[" ".join(command[1:3])] = capsys.readouterr().out
        return said

    return run


def assert_as_told(said):
    assert "slow weights" in said["train --base"]
    assert "rows written" in said["chat runs/qwen_memory"]
    assert "The memory 'alice' is saved." in said["chat runs/qwen_memory"]


@pytest.mark.slow
def test_the_tutorials_commands_go_from_a_folder_to_a_memory_and_back(run_page, capsys):
    assert_as_told(run_page())
    assert list(Path("runs/qwen_memory/memories").iterdir())
    data = load_run("runs/qwen_memory").experiment.data
    assert load_tokenizer(data.tokenizer).eos_id == 256
    answer = ["--prompt", "Ann", "--chat", "True", "--max_new_tokens", "3"]
    assert program.main(["generate", "runs/qwen_memory", *answer]) == 0
    answered = capsys.readouterr().out.removesuffix("\n")
    assert not answered.startswith("Ann")
    assert program.main(["import", "hf", "exported", "runs/again"]) == 0
    assert program.main(["generate", "runs/again", *answer]) == 0
    assert capsys.readouterr().out.removesuffix("\n").endswith(answered)


@pytest.mark.slow
def test_a_link_out_of_a_received_model_is_not_kept_and_one_of_the_hubs_cache_is(
    folder, tmp_path, capsys
):
    received = tmp_path / "received"
    shutil.copytree(folder, received)
    secret = tmp_path / "secret"
    secret.write_text("{# what the user never shares #}")
    (received / "chat_template.jinja").symlink_to(secret)
    assert program.main(["import", "hf", str(received), str(tmp_path / "run")]) == 2
    assert "chat_template.jinja is a link out of its folder; put" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    (received / "chat_template.jinja").unlink()
    with (received / "chat_template.jinja").open("wb") as zeros:
        zeros.truncate(3 * 2**30)
    assert program.main(["import", "hf", str(received), str(tmp_path / "run")]) == 2
    assert "chat_template.jinja has 3,221,225,472 bytes" in capsys.readouterr().err

    snapshot = tmp_path / "models--o--m" / "snapshots" / ("a" * 40)
    shutil.copytree(folder, snapshot)
    blob = tmp_path / "models--o--m" / "blobs" / "b"
    blob.parent.mkdir()
    (snapshot / "config.json").rename(blob)
    (snapshot / "config.json").symlink_to("../../blobs/b")
    assert program.main(["import", "hf", str(snapshot), str(tmp_path / "run")]) == 0


@pytest.mark.extras
@pytest.mark.skipif(
    find_spec("torch") is None or find_spec("transformers") is None,
    reason="torch and transformers: not installed",
)
def test_the_tutorials_lines_in_pytorch_take_its_memory_there_and_back(
    run_page, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    assert_as_told(run_page())
    memories = Path("runs/qwen_memory/memories")
    alice, bob = (memories / f"{name}.safetensors" for name in ("alice", "bob"))
    bob.unlink()  # The page's last command has begun it without PyTorch.
    lines = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    before = alice.read_bytes()
    exec(lines, {})
    assert alice.read_bytes() == before
    (read,) = describe(memories, "bob").num_read
    assert read > 0
    asked = ["--memory", "bob", "--prompt", "Who?", "--chat", "True", "--max_new_tokens", "3"]
    assert program.main(["generate", "runs/qwen_memory", *asked]) == 0
    assert describe(memories, "bob").num_read != (read,)
