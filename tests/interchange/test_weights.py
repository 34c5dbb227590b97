"""Weights that leave a run and come back, in our names and in the release's."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fwpkm_jax.cli import main
from fwpkm_jax.config import load_config
from fwpkm_jax.core.slots.options.retention import Retention
from fwpkm_jax.interchange import Weights, export_run, read_folder, start_run
from fwpkm_jax.interchange.weights import abstract_weights
from fwpkm_jax.io import status_line
from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayerConfig
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers.attention import AttentionConfig
from fwpkm_jax.layers.mixers.gated_delta_net import GatedDeltaNetConfig
from fwpkm_jax.layers.pkm import PKMConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.paper.release import from_release, read_release, to_release
from fwpkm_jax.rules import FwMLP, FwPKM
from fwpkm_jax.run import load_run
from fwpkm_jax.training.state import MemoryConfig

MODEL = ModelConfig(
    vocab_size=64,
    model_dim=8,
    mixers=("gdn", "swa", "attention"),
    mlp_dim=12,
    memory_layers=(1,),
    pkm_layers=(2,),
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4, rotary_fraction=0.5),
    gdn=GatedDeltaNetConfig(num_key_heads=1, num_value_heads=2, key_head_dim=4, value_head_dim=4),
    fast_weight=FastWeightConfig(rule=FwPKM(num_subkeys=4, key_dim=4, value_dim=6, top_k=2)),
    pkm=PKMConfig(num_subkeys=4, key_dim=4, value_dim=8, num_heads=2, top_k=2),
    activation_dtype="float32",
)
RETENTIVE = replace(
    MODEL,
    fast_weight=replace(
        MODEL.fast_weight,
        rule=replace(MODEL.fast_weight.rule, retention=Retention(hardening=0.5, replay=3)),
    ),
)
FWMLP = replace(
    MODEL,
    fast_weight=FastWeightConfig(rule=FwMLP(key_dim=4, value_dim=6, hidden_dim=5)),
    pkm=replace(MODEL.pkm, query_norm=False, gated=False),
    tie_embeddings=False,
)


def weights_of(model: ModelConfig, *, groups: int = 1) -> Weights:
    """Weights in which no array is zero."""
    rng = np.random.default_rng(0)
    like = abstract_weights(model, groups=groups)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), like)


def assert_same(actual: Weights, expected: Weights) -> None:
    actual, expected = actual.named(), expected.named()
    assert list(actual) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    base = load_config("recall")
    training = replace(base.training, memory=MemoryConfig(groups=2), batch_size=2, steps=4)
    directory = tmp_path_factory.mktemp("runs") / "run"
    return replace(base, model=MODEL, training=training, run_dir=str(directory))


@pytest.fixture(scope="module")
def weights():
    return weights_of(MODEL)


@pytest.mark.parametrize("model", [MODEL, FWMLP], ids=["fwpkm", "fwmlp"])
def test_the_releases_names_hold_everything_and_give_it_back(model):
    weights = weights_of(model)
    tensors = to_release(weights, model)
    assert len(tensors) == len(weights.named())
    assert_same(from_release(tensors, model), weights)


def test_the_release_holds_maps_from_the_right():
    """Its linear maps and its head are `[out, in]`, its convolutions `[channels, 1, width]`."""
    weights = weights_of(FWMLP)
    named, tensors = weights.named(), to_release(weights, FWMLP)
    for ours, theirs in {
        "params/head": "lm_head.weight",
        "params/blocks/1/mixer/o_proj/kernel": "model.layers.1.self_attn.o_proj.weight",
        "memory/layer_1/up_kernel": "model.layers.1.fwpkm.w_up",
    }.items():
        array = named[ours][0] if ours.startswith("memory/") else named[ours]
        np.testing.assert_array_equal(tensors[theirs], array.T, err_msg=theirs)
    convolution = named["params/blocks/0/mixer/conv_weight"]
    np.testing.assert_array_equal(
        tensors["model.layers.0.linear_attn.conv1d.weight"], convolution.T[:, None]
    )


def test_a_file_of_the_release_gives_the_weights(tmp_path, weights):
    tensors = {name: np.ascontiguousarray(x) for name, x in to_release(weights, MODEL).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # Tied: stored twice.
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    assert_same(read_release(path, MODEL), weights)

    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}, path)
    with pytest.raises(ValueError, match=r"lm_head\.weight that differs"):
        read_release(path, MODEL)


@pytest.mark.thorough
def test_tensors_that_do_not_fit_are_named(weights):
    tensors = to_release(weights, MODEL)
    with pytest.raises(ValueError, match=r"lacks model\.norm\.weight;"):
        from_release({n: x for n, x in tensors.items() if n != "model.norm.weight"}, MODEL)
    with pytest.raises(ValueError, match="without a place in the model, extra"):
        from_release(tensors | {"extra": tensors["model.norm.weight"]}, MODEL)
    wrong = tensors | {"model.norm.weight": np.zeros(9, np.float32)}
    with pytest.raises(ValueError, match=r"model\.norm\.weight' has the shape \[9\].* \[8\]"):
        from_release(wrong, MODEL)
    with pytest.raises(ValueError, match="the release's names for such a layer are unknown"):
        from_release({}, replace(MODEL, mixers=("lact", "swa", "attention")))
    with pytest.raises(ValueError, match="the release has no such layer"):
        to_release(weights, replace(MODEL, fast_weight_layer=FastWeightLayerConfig(hidden_dim=4)))
    with pytest.raises(ValueError, match=r"The release has no Retention\(.*set it to None"):
        to_release(weights, RETENTIVE)
    with pytest.raises(ValueError, match="holds 2 memories"):
        to_release(weights_of(MODEL, groups=2), MODEL)


@pytest.mark.slow
def test_commands_show_a_terminal_how_far_they_are(
    experiment, weights, tmp_path, capsys, monkeypatch
):
    experiment = replace(experiment, run_dir=str(tmp_path / "run"))
    run, folder, again = start_run(experiment, weights), tmp_path / "folder", tmp_path / "again"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(status_line, "_SECONDS", -1.0)
    for command, says, done, wrote in (
        (["export", str(run), str(folder)], f"Exporting {run} ...\n", "arrays written", folder),
        (
            ["import", "weights", str(folder), str(again)],
            f"Reading weights and writing {again} ...\n",
            "arrays read",
            again,
        ),
    ):
        assert main(command) == 0
        out, errors = capsys.readouterr()
        assert out == f"wrote {wrote}\n"
        assert errors.startswith(f"{says}\r{done}: 1/")
        assert errors.endswith("\r\x1b[K")


@pytest.mark.slow
def test_weights_leave_a_run_and_come_back(experiment, weights, tmp_path):
    run = start_run(experiment, weights)
    folder = export_run(run, tmp_path / "exported")
    stored = load_file(folder / "weights.safetensors")
    assert stored["params/blocks/2/feed_forward/values"].shape == (16, 8)

    # The one memory became the start of both that the run carries.
    found, exported = read_folder(folder)
    assert found == experiment
    assert_same(exported, weights_with_groups(weights, 2))

    first = read_folder(export_run(run, tmp_path / "first", memories="first"))[1]
    assert_same(first, weights)

    again = replace(experiment, run_dir=str(tmp_path / "again"))
    assert_same(Weights(*load_run(start_run(again, exported))[2:4]), exported)
    with pytest.raises(FileExistsError, match="exported exists"):
        export_run(run, folder)
    with pytest.raises(ValueError, match="is not empty"):
        start_run(again, exported)
    training = replace(experiment.training, memory=MemoryConfig(groups=4), batch_size=4)
    other = replace(again, training=training, run_dir=str(tmp_path / "other"))
    with pytest.raises(ValueError, match="hold 2 memories per layer, the run carries 4"):
        start_run(other, exported)


def weights_with_groups(weights: Weights, groups: int) -> Weights:
    memory = jax.tree.map(lambda x: np.repeat(np.asarray(x), groups, 0), weights.memory)
    return weights._replace(memory=memory)


@pytest.mark.slow
def test_the_command_imports_and_says_what_is_wrong(weights, tmp_path, capsys):
    config = tmp_path / "config.py"
    config.write_text(
        "from dataclasses import replace\n"
        "from fwpkm_jax.config import load_config\n"
        "from tests.interchange.test_weights import MODEL\n"
        "def get_config():\n"
        "    return replace(load_config('recall'), model=MODEL)\n"
    )
    checkpoint = tmp_path / "model.safetensors"
    tensors = to_release(weights, MODEL)
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, checkpoint)
    run = str(tmp_path / "run")
    command = ["import", "release", str(checkpoint), run, "--config", str(config)]
    assert main(command) == 0
    assert load_run(run).step == 0
    assert main(command) == 2
    assert "choose another run directory" in capsys.readouterr().err
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert main(["export", run, str(tmp_path / "given")]) == 0
    for name in ("weights.safetensors", "config.json"):  # Whoever may read a new file may read it.
        assert (tmp_path / "given" / name).stat().st_mode == (tmp_path / "file").stat().st_mode
    assert main(["import", "weights", str(tmp_path / "given"), str(tmp_path / "again")]) == 0
    assert main(["export", run, str(tmp_path / "given")]) == 2
    assert "choose a folder that does not" in capsys.readouterr().err
    assert main(["import", "weights", str(tmp_path / "folder"), str(tmp_path / "other")]) == 2
    assert "holds no exported weights" in capsys.readouterr().err
