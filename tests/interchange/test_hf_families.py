"""Families of the transformers library, held to what the library computes with small models.

`make_families` has asked the library; see there for what `data/families.*` hold.
"""

import json
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from fwpkm_jax import generate, init_generation
from fwpkm_jax.cli.experiment import parse_command_line
from fwpkm_jax.interchange.hf import (
    export_model,
    import_model,
    model_config,
    open_folder,
    read_weights,
)
from fwpkm_jax.interchange.hf.described import changes, config_text
from fwpkm_jax.models.language_model import LanguageModel
from tests.interchange.make_families import (
    DATA,
    LENGTH,
    MODELS,
    NEW_TOKENS,
    PADDING,
    computed,
    described,
    inputs,
    write_model,
)
from tests.interchange.test_hf import largest_difference, passes

KNOWN = json.loads((DATA / "families.json").read_text())
LOGITS = np.load(DATA / "families.npz")

each_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture
def folder(name, tmp_path):
    """The folder of a model that the library has described."""
    known = KNOWN["models"][name]
    write_model(tmp_path / "model", known["config"], known["tensors"])
    return tmp_path / "model"


def compared(folder, name, *, streamed):
    """Largest differences of our two passes from the library's, as shares of its largest logit."""
    tokens, mask = inputs()
    given = {"input_ids": tokens, "mask": mask}
    with jax.default_matmul_precision("highest"):
        whole, padded = passes(folder, given, streamed=streamed)
    theirs = LOGITS[f"{name}/whole"]
    behind_padding = np.stack([theirs[0], LOGITS[f"{name}/padded"]])
    largest, real = np.max(np.abs(theirs)), mask > 0
    return (
        largest_difference(whole, theirs) / largest,
        largest_difference(padded[real], behind_padding[real]) / largest,
    )


@pytest.mark.slow
@each_model
def test_logits_are_the_library_s_also_behind_padding(folder, name):
    """In one pass: of two sequences one has padding in front."""
    source = open_folder(folder)
    model = nnx.eval_shape(lambda: LanguageModel(source.config, rngs=nnx.Rngs(0)))
    tokens, mask = inputs()

    @jax.jit
    def run(params):
        whole = nnx.merge(nnx.split(model)[0], params)
        return whole(jnp.asarray(tokens), {}, mask=jnp.asarray(mask)).logits

    with jax.default_matmul_precision("highest"):
        ours = np.asarray(run(read_weights(source).params))
    theirs = np.stack([LOGITS[f"{name}/whole"][0], LOGITS[f"{name}/padded"]])
    real = mask > 0
    assert largest_difference(ours[real], theirs[real]) < 2e-5 * np.max(np.abs(theirs))


@pytest.mark.thorough("smollm3")
@pytest.mark.slow_cases("qwen3_5_moe")
@each_model
def test_a_whole_pass_and_a_stream_give_the_library_s_logits(folder, name):
    """The stream in a piece and single tokens, behind padding."""
    assert max(compared(folder, name, streamed=True)) < 2e-5


@pytest.mark.slow
@pytest.mark.slow_cases("olmo3")
@each_model
def test_greedy_texts_of_prompts_of_two_lengths_are_the_library_s(folder, name):
    source = open_folder(folder)
    model = nnx.eval_shape(lambda: LanguageModel(source.config, rngs=nnx.Rngs(0)))
    model = nnx.merge(nnx.split(model)[0], read_weights(source).params)
    tokens, _ = inputs()
    state = init_generation(model, {}, batch=2, max_length=LENGTH + NEW_TOKENS)
    prompts = [tokens[0], tokens[1, PADDING:]]
    with jax.default_matmul_precision("highest"):
        out = generate(model, prompts, state, max_new_tokens=NEW_TOKENS)
    np.testing.assert_array_equal(out.tokens, KNOWN["models"][name]["text"])


@pytest.mark.slow
@pytest.mark.slow_cases("qwen3_moe")
@each_model
def test_an_import_and_an_export_give_the_folder_again(folder, name, tmp_path):
    import_model(folder, tmp_path / "run", say=lambda _: None)
    export_model(tmp_path / "run", tmp_path / "out")
    before, after = (load_file(x / "model.safetensors") for x in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    for tensor in before:
        np.testing.assert_array_equal(after[tensor], before[tensor], err_msg=tensor)
    text = json.loads((tmp_path / "out" / "config.json").read_text())
    assert text == KNOWN["models"][name]["config"]


@pytest.mark.thorough("gemma3")
@pytest.mark.parametrize("name", ["gemma3", "smollm3"])
def test_a_memory_goes_into_a_model_whose_layers_differ(folder, name, tmp_path):
    import_model(folder, tmp_path / "run", say=lambda _: None)
    rule = {"num_subkeys": 4, "key_dim": 8, "value_dim": 8, "top_k": 2, "num_heads": 1}
    options = [x for n, v in rule.items() for x in (f"--model.fast_weight.rule.{n}", str(v))]
    command = ["--base", str(tmp_path / "run"), "--run_dir", str(tmp_path / "new"), *options]
    command += ["--model.memory_layers", "1", "--optimizer.train", ".*/memory/.*"]
    experiment = parse_command_line(command, default="recall")
    before = open_folder(folder).config
    assert experiment.model.mixers == before.mixers
    assert changes(before, experiment.model) == []


@each_model
def test_a_model_of_a_family_is_described_as_that_family(name):
    """Without the file that it came from; where two families compute the same, as the first."""
    config = model_config(KNOWN["models"][name]["config"])
    text = config_text(config, context=64)
    first = {"mistral": "llama", "qwen3_5_moe": "qwen3_next"}
    expected = first.get(name, MODELS[name]["model_type"])
    assert text["model_type"] == expected
    assert changes(model_config(text), config) == []


@pytest.mark.parametrize("name", ["gemma3"])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_part_of_a_model_of_images_is_read(folder, prefix):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    plain = open_folder(folder)
    renamed = {prefix + x.removeprefix("model."): array for x, array in tensors.items()}
    for seen in ("vision_tower.encoder.weight", "multi_modal_projector.mm_input_projection_weight"):
        renamed[seen] = np.ones((2, 2), np.float32)
    save_file(renamed, file)
    text = json.loads((folder / "config.json").read_text())
    both = {"model_type": "gemma3", "vision_config": {}, "text_config": text}
    (folder / "config.json").write_text(json.dumps(both))
    source = open_folder(folder)
    assert source.config == plain.config
    assert source.left_out == {"vision tower": 2}
    for ours, part in source.parts.items():
        assert part.names == plain.parts[ours].names


OLD = {
    "gemma3_text": {"rope_theta": 1e5, "rope_local_base_freq": 2e4},
    "olmo3": {"rope_theta": 1e5},
    "smollm3": {"rope_theta": 1e5},
}
"""How files from before `rope_parameters` say the base of the rotary frequencies."""


@pytest.mark.parametrize("model_type", OLD)
def test_files_of_older_versions_say_the_same(model_type):
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = OLD[model_type] | {"model_type": model_type, "rope_scaling": scaling}
    config = model_config({**old, "num_hidden_layers": 8})
    assert (config.attention.rope_theta, config.attention.linear_scaling) == (1e5, 2.0)
    first = config.mixer_configs[0]
    if model_type != "smollm3":
        theta = old.get("rope_local_base_freq", 1e5)
        assert (first.rope_theta, first.linear_scaling, first.window) == (theta, None, 4096)
        rope = {
            "full_attention": {**scaling, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        }
    else:
        rope = {**scaling, "rope_theta": 1e5}
    new = {"model_type": model_type, "num_hidden_layers": 8, "rope_parameters": rope}
    assert model_config(new) == config


def test_settings_of_one_family_alone_are_read():
    smol = {"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1, 1]}
    config = model_config(smol)
    assert [x.rotary_dim for x in config.mixer_configs] == [128, 0, 128]
    qwen = {"model_type": "qwen2", "num_hidden_layers": 1, "sliding_window": None}
    assert model_config({**qwen, "use_sliding_window": True}).mixers == ("attention",)
    bias = model_config(qwen).attention
    assert (bias.bias, bias.has_output_bias) == (True, False)
    gemma = model_config({"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 6})
    assert gemma.embedding_scale == 8
    assert [x.receptive_field for x in gemma.mixer_configs] == [4096] * 5 + [None]
    assert gemma.sandwich_norm_layers == (0, 1, 2, 3, 4, 5)
    for key in ("num_experts", "num_local_experts"):
        moe = {"model_type": "qwen3_moe", "num_hidden_layers": 2, key: 16}
        assert model_config(moe).experts.num_experts == 16
    mistral = {"model_type": "mistral", "num_hidden_layers": 2}
    assert model_config(mistral).mixers == ("swa", "swa")
    assert model_config({**mistral, "sliding_window": None}).mixers == ("attention",) * 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "no bounded logits"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "read those after"),
        ({"model_type": "gemma3_text", "sliding_window": None}, "sliding_window=None give"),
        ({"model_type": "gemma3_text", "hidden_activation": "xielu"}, "hidden_activation='xielu'"),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1.0}}, "needs entries"),
        (
            {"model_type": "olmo3", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "full_attention: rope_type='dynamic' is none of default",
        ),
        ({"model_type": "olmo3", "rope_theta": None}, "rope_theta=None must be a finite number"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 2]}, "no_rope_layers=.* 0 and 1"),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"], "num_hidden_layers": 1},
            "use_sliding_window=False and sliding_window=4096 give no window",
        ),
        ({"model_type": "olmo2", "num_hidden_layers": 0}, "num_hidden_layers=0 must be"),
        ({"model_type": "qwen3_5_moe_text", "num_experts": 0}, "num_experts=0 must be"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window=0 must be an integer"),
    ],
)
def test_what_a_family_s_file_may_not_say_is_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        model_config(values)


@pytest.mark.thorough("qwen2")
@pytest.mark.extras
@pytest.mark.skipif(
    find_spec("torch") is None or find_spec("transformers") is None,
    reason="torch and transformers: not installed",
)
@each_model
def test_the_library_that_is_installed_computes_the_same(name, folder, tmp_path):
    """The committed logits, and a folder that this library describes itself."""
    of_library = computed(folder)
    for kind in ("whole", "padded"):
        theirs = LOGITS[f"{name}/{kind}"]
        assert largest_difference(of_library[kind], theirs) < 1e-5 * np.max(np.abs(theirs))
    values = described(name, tmp_path / "random")
    assert changes(model_config(values["config"]), open_folder(folder).config) == []
