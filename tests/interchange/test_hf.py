"""Models of the transformers library: every folder in `../shared/hf` against the library's logits.

`logits_f64` of those folders is the library's model in double, whose norms and recurrences still
cast to float32; it is therefore 1e-7 to 1e-6 off. `data/hf_float64.npz` holds some positions of the
logits that transformers 5.23.0 gives once `torch.float32` and `Tensor.float` mean float64 in its
modelling code, rotary tables and experts included.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.cli import main
from fwpkm_jax.cli.experiment import parse_command_line
from fwpkm_jax.interchange import Weights
from fwpkm_jax.interchange.hf import (
    export_model,
    import_model,
    model_config,
    open_folder,
    read_weights,
)
from fwpkm_jax.io.atomic import write_json
from fwpkm_jax.layers.lora import merged
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.run import load_run, setup
from fwpkm_jax.training.checkpoints.checkpoint import Checkpoints

SHARED = Path(__file__).parents[2].parent / "shared" / "hf"
FOLDERS = sorted(path.parent for path in SHARED.glob("*/expected.npz"))
EXACT = np.load(Path(__file__).parent / "data" / "hf_float64.npz")
PLACES = [0, 5, 20, 40, 60, 69]
LIBRARY_FLOAT64 = {"llama3": 2e-7, "qwen3": 2e-7, "qwen3_5": 1.2e-6, "olmo_hybrid": 1.2e-6}
"""Of the largest logit, by folder: what the library's casts leave of float64. Found are 0.9e-7 and
1.3e-7 where only norms and rotary tables are cast, 0.8e-6 and 1.0e-6 where recurrences are too."""


def each_folder(*by_default, slow=()):
    """Every folder; those of other names are thorough."""

    def marks(name):
        return pytest.mark.slow if name in slow else pytest.mark.thorough

    cases = [
        pytest.param(path, id=path.name, marks=() if path.name in by_default else marks(path.name))
        for path in FOLDERS
    ]
    return pytest.mark.parametrize("folder", cases)


needs_folders = pytest.mark.skipif(not FOLDERS, reason=f"{SHARED} holds no models")


def passes(folder, expected, *, streamed):
    """Logits of whole sequences, of padded ones, and of a stream of one piece and single tokens."""
    source = open_folder(folder)
    params = read_weights(source).params
    wide = jax.dtypes.canonicalize_dtype(np.float64)
    params = jax.tree.map(lambda x: x.astype(wide), params)
    model = nnx.eval_shape(lambda: LanguageModel(source.config, rngs=nnx.Rngs(0), dtype=None))
    graphdef = nnx.split(model)[0]
    tokens = jnp.asarray(expected["input_ids"], jnp.int32)
    mask = jnp.asarray(expected["mask"], jnp.float32)
    batch, length = tokens.shape

    @jax.jit
    def run(params):
        model = nnx.merge(graphdef, params)
        whole = model(tokens, {}).logits
        if not streamed:
            return whole, model(tokens, {}, mask=mask).logits
        stream = model.init_stream({}, batch=batch, max_length=length)
        first = model.stream(tokens[:, : length // 2], stream, mask=mask[:, : length // 2])

        def step(stream, token):
            out = model.stream(token[:, None], stream)
            return out.stream, out.logits[:, 0]

        _, rest = jax.lax.scan(step, first.stream, tokens[:, length // 2 :].T)
        return whole, jnp.concatenate([first.logits, jnp.swapaxes(rest, 0, 1)], axis=1)

    return [np.asarray(x) for x in run(params)]


def largest_difference(a, b):
    return float(np.max(np.abs(a - b)))


@pytest.mark.slow_cases("qwen3", "qwen3_next_moe")
@each_folder(slow=["llama3", "qwen3_5", "olmo_hybrid"])
def test_float64_is_what_the_library_computes_without_its_casts(folder):
    expected = np.load(folder / "expected.npz")
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        whole, streamed = passes(folder, expected, streamed=True)
    largest = np.max(np.abs(expected["logits"]))
    if "logits_f64" in expected:
        allowed = LIBRARY_FLOAT64.get(folder.name, 2e-6)
        assert largest_difference(whole, expected["logits_f64"]) < allowed * largest
    ids = f"{folder.name}:input_ids"
    if ids in EXACT and np.array_equal(EXACT[ids], expected["input_ids"]):
        assert largest_difference(whole[:, PLACES], EXACT[folder.name]) < 1e-12
    # The stream has the padding of `mask`, so only the other rows are the whole pass's.
    full = expected["mask"].all(axis=1)
    assert full.any()
    assert largest_difference(whole[full], streamed[full]) < 1e-9
    if "logits_left_padded" in expected:
        real = expected["mask"] > 0
        padded = expected["logits_left_padded"]
        assert largest_difference(streamed[real], padded[real]) < 2e-5 * largest


@each_folder("llama3", "qwen3", slow=["qwen3_5", "olmo_hybrid", "qwen3_next_moe"])
def test_float32_is_what_the_library_computes(folder):
    expected = np.load(folder / "expected.npz")
    with jax.default_matmul_precision("highest"):
        whole, padded = passes(folder, expected, streamed=False)
    largest = np.max(np.abs(expected["logits"]))
    assert largest_difference(whole, expected["logits"]) < 2e-5 * largest
    if "logits_left_padded" in expected:
        real = expected["mask"] > 0
        left = expected["logits_left_padded"]
        assert largest_difference(padded[real], left[real]) < 2e-5 * largest


QWEN = {"model_type": "qwen3", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_oss"}, "model_type='gpt_oss' is none of gemma3, gemma3_text, llama"),
        ({"hidden_act": "xielu"}, "hidden_act='xielu' is none of gelu"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope' is none of default"),
        ({"rope_parameters": {"full_attention": {}}}, "an entry for full_attention"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling has no factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 has no meaning in a qwen3"),
        ({"layer_types": ["full_attention", "conv"]}, "holds 'conv'; a qwen3 has full_attention"),
        ({"layer_types": ["full_attention"]}, "names 1 layers, num_hidden_layers=2"),
        ({"layer_types": ["sliding_attention"] * 2}, "give no window"),
        ({"quantization_config": {"bits": 4}}, "quantised weights cannot be read"),
        ({"model_type": "qwen3_next", "attn_output_gate": False}, "attn_output_gate=False"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        model_config(QWEN | changes)


def test_every_setting_that_files_have_is_read():
    config = model_config(
        QWEN
        | {"attention_bias": True, "use_sliding_window": True, "sliding_window": 9}
        | {"max_window_layers": 1, "hidden_act": "gelu_new", "num_key_value_heads": 2}
        | {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False}}
        | {"max_position_embeddings": 64}
    )
    assert config.mixers == ("attention", "swa")
    assert (config.window, config.mlp_activation) == (9, "gelu_tanh")
    assert config.attention.bias
    assert config.attention.rope_theta == 5e5
    yarn = config.attention.yarn
    assert (yarn.factor, yarn.original_length, yarn.truncate) == (4.0, 64, False)
    next_ = {"model_type": "qwen3_next", "num_hidden_layers": 8, "mlp_only_layers": [5]}
    config = model_config(next_ | {"decoder_sparse_step": 2, "norm_topk_prob": False})
    assert config.mixers == ("gdn", "gdn", "gdn", "attention") * 2
    assert config.expert_layers == (1, 3, 7)
    assert not config.experts.renormalize
    both = {"model_type": "qwen3_5", "vision_config": {}, "tie_word_embeddings": True}
    assert model_config(both | {"text_config": {"num_hidden_layers": 4}}).tie_embeddings
    olmo = {"model_type": "olmo_hybrid", "rope_parameters": {"rope_theta": None}}
    config = model_config(olmo | {"num_hidden_layers": 3, "linear_allow_neg_eigval": False})
    assert config.mixers == ("gdn", "gdn", "attention")
    assert (config.attention.rotary_dim, config.gdn.max_strength) == (0, 1.0)
    assert config.post_norm_layers == (2,)


def copy_without(folder, target, names=(), *, renamed=()):
    """A copy of a folder with one file, some tensors left out or renamed."""
    from safetensors.numpy import load_file, save_file

    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    for name in names:
        del tensors[name]
    tensors |= {new: tensors[old] for old, new in renamed}
    save_file(tensors, target / "model.safetensors")
    return target


@needs_folders
def test_tensors_that_do_not_fit_are_named(tmp_path):
    qwen = SHARED / "qwen3"
    lost = copy_without(qwen, tmp_path / "lost", ["model.norm.weight"])
    with pytest.raises(ValueError, match=r"lacks model\.norm\.weight"):
        open_folder(lost)
    name = "model.norm.weight"
    more = copy_without(qwen, tmp_path / "more", renamed=[(name, "score.weight")])
    with pytest.raises(ValueError, match=r"without a place in the model, score\.weight"):
        open_folder(more)
    k = "model.layers.0.self_attn.k_norm.weight"
    wrong = copy_without(qwen, tmp_path / "wrong", renamed=[(name, k)])
    with pytest.raises(ValueError, match=r"k_norm\.weight has the shape \[32\]; .* \[16\]"):
        open_folder(wrong)
    tied = [("model.layers.0.mlp.gate_proj.weight", "lm_head.weight")]
    other = copy_without(qwen, tmp_path / "tied", renamed=tied)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from"):
        open_folder(other)
    away = [(name, "model.visual.norm.weight"), (name, "mtp.norm.weight")]
    seen = copy_without(qwen, tmp_path / "seen", renamed=away)
    assert open_folder(seen).left_out == {"vision tower": 1, "multi-token head": 1}
    file = seen / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match="damaged or cut short"):
        open_folder(seen)


@needs_folders
def test_bfloat16_stays_and_vectors_are_float32(tmp_path):
    import ml_dtypes
    from safetensors.numpy import load_file, save_file

    folder = copy_without(SHARED / "olmo_hybrid", tmp_path / "narrow")
    file = folder / "model.safetensors"
    tensors = {n: x.astype(ml_dtypes.bfloat16) for n, x in load_file(file).items()}
    save_file(tensors, file)
    source = open_folder(folder)
    assert source.config.parameter_dtype == "bfloat16"
    named = read_weights(source).named()
    assert named["params/blocks/0/mixer/in_proj_qkvz/kernel"].dtype == jnp.bfloat16
    assert named["params/blocks/0/mixer/A_log"].dtype == jnp.float32
    np.testing.assert_array_equal(named["params/head"], tensors["lm_head.weight"].T)
    wide = open_folder(folder, dtype="float32").config
    assert wide == dataclasses.replace(
        source.config, parameter_dtype="float32", activation_dtype="float32"
    )


@needs_folders
def test_the_index_of_several_files_is_checked(tmp_path):
    folder = tmp_path / "sharded"
    folder.mkdir()
    for file in (SHARED / "qwen3_5").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    open_folder(folder)
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["nowhere"] = "model-00001-of-00004.safetensors"
    index.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="'nowhere' is named, and is in none of its files"):
        open_folder(folder)
    (folder / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="00002"):
        open_folder(folder)


def tensors_of(folder):
    from safetensors.numpy import load_file

    tensors = {}
    for file in folder.glob("model*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.slow_cases("qwen3_next_moe")
@each_folder("qwen3", slow=["llama3", "qwen3_5", "olmo_hybrid"])
def test_an_import_and_an_export_give_the_folder_again(folder, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(["import", "hf", str(folder), str(run)]) == 0
    assert main(["export", "hf", str(run), str(out)]) == 0
    capsys.readouterr()
    before, after = tensors_of(folder), tensors_of(out)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        np.testing.assert_array_equal(after[name], tensor, err_msg=name)
    assert json.loads((out / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    assert main(["export", "hf", str(run), str(out)]) != 0
    assert "out exists; choose a folder" in capsys.readouterr().err


@pytest.mark.slow
@needs_folders
def test_a_model_leaves_with_memories_and_merged_updates_and_comes_back(tmp_path):
    folder, run, out = SHARED / "qwen3_5", tmp_path / "run", tmp_path / "out"
    import_model(folder, run, say=lambda _: None)
    rule = {"num_subkeys": 4, "key_dim": 8, "value_dim": 8, "top_k": 2, "num_heads": 1}
    options = [x for n, v in rule.items() for x in (f"--model.fast_weight.rule.{n}", str(v))]
    command = ["--base", str(run), "--run_dir", str(tmp_path / "new"), *options]
    command += ["--model.memory_layers", "1", "--optimizer.train", ".*/memory/.*"]
    command += ["--model.lora.maps", ".*/q_proj", "--model.lora.rank", "2"]
    experiment = parse_command_line(command, default="recall")
    parts = setup.make_setup(experiment)
    (tmp_path / "new").mkdir()
    write_json(tmp_path / "new" / "config.json", experiment.to_json())
    with Checkpoints(tmp_path / "new" / "checkpoints", experiment.checkpoint) as checkpoints:
        state = setup.new_state(parts, checkpoints)
        moved = Weights(state.params, {})
        changes = {n: x + 0.1 for n, x in moved.named().items() if n.endswith("lora_b")}
        state = state._replace(params=moved.replaced(moved.named() | changes).params)
        checkpoints.save(state, data_position=None, config=experiment.to_json())
    export_model(tmp_path / "new", out, most_bytes=20_000)
    assert len(list(out.glob("model-*"))) > 3
    before, after = tensors_of(folder), tensors_of(out)
    changed = {n for n, tensor in before.items() if not np.array_equal(after[n], tensor)}
    assert changed
    assert all(name.endswith("q_proj.weight") for name in changed)
    note = json.loads((out / "config.json").read_text())["fwpkm_jax"]
    assert note["model"]["memory_layers"] == [1]
    source = open_folder(out)
    assert source.config == dataclasses.replace(experiment.model, lora=None)
    read = read_weights(source).named()
    loaded = load_run(tmp_path / "new")
    named = Weights(loaded.params, loaded.memory).named()
    assert experiment.model.lora is not None
    for name, array in merged(named, experiment.model.lora).items():
        np.testing.assert_array_equal(read[name], array, err_msg=name)
    other = dataclasses.replace(experiment.model, norm_eps=1e-3)
    changed = dataclasses.replace(experiment, model=other)
    write_json(tmp_path / "new" / "config.json", changed.to_json())
    with pytest.raises(ValueError, match=r"another model than was imported \(model\.norm_eps"):
        export_model(tmp_path / "new", tmp_path / "again")
