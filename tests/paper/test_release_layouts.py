"""Every layout in which a checkpoint of the authors' release can lie, and its `config.json`."""

import argparse
import collections
import json
import os
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from fwpkm_jax.io import status_line
from fwpkm_jax.paper.release import read_release, to_release
from fwpkm_jax.paper.release.layouts import read_checkpoint
from fwpkm_jax.paper.release.release_config import release_config
from fwpkm_jax.run import load_run
from tests.interchange.test_hub import hub, run  # noqa: F401
from tests.interchange.test_weights import weights_of

CONFIG = {
    "model_type": "qwen3_next_mem", "architectures": ["Qwen3NextMemForCausalLM"],
    "vocab_size": 30, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": True, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 4,
    "linear_value_head_dim": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "pkm_layers": [0], "pkm_k_dim": 4, "pkm_v_dim": -1, "pkm_heads": 2, "pkm_topk": 2,
    "pkm_n_subkeys": 4, "pkm_query_rmsnorm": True, "fwpkm_layers": [1], "fwpkm_k_dim": 4,
    "fwpkm_v_dim": 6, "fwpkm_heads": 1, "fwpkm_topk": 2, "fwpkm_n_subkeys": 4,
    "fwpkm_update_chunk_size": 8, "fwpkm_target_lookahead": 0,
}  # fmt: skip
MODEL = release_config(CONFIG)
TENSORS = {
    name: np.ascontiguousarray(x) for name, x in to_release(weights_of(MODEL), MODEL).items()
}
NAMES = sorted(TENSORS)
HALVES = NAMES[::2], NAMES[1::2]
BIN = "pytorch_model.bin"


def torch_tensors(names=NAMES, *, prefix=""):
    torch = pytest.importorskip("torch")
    return collections.OrderedDict(
        (prefix + n, torch.nn.Parameter(torch.from_numpy(TENSORS[n].copy()))) for n in names
    )


def write_torch_file(path, content):
    torch = pytest.importorskip("torch")
    torch.save(content, path)


def write_states(path, tensors):
    """What DeepSpeed writes: the model beside settings and counts."""
    path.parent.mkdir(exist_ok=True)
    content = {
        "module": tensors,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [collections.OrderedDict((n, TENSORS[n].shape) for n in NAMES)],
        "ds_config": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}},
        "dp_world_size": 4,
        "sparse_tensor_module_names": {"a"},
        "skipped_steps": 0,
    }
    write_torch_file(path, content)


def one_safetensors(folder):
    save_file(TENSORS, folder / "model.safetensors")


def one_file_of_torch(folder):
    write_torch_file(folder / BIN, torch_tensors())


def sharded(folder, write, ending, index):
    files = {f"part-{i}{ending}": half for i, half in enumerate(HALVES)}
    for file, names in files.items():
        write(folder / file, names)
    places = {name: file for file, names in files.items() for name in names}
    (folder / index).write_text(json.dumps({"weight_map": places}))


def safetensors_shards(folder):
    def write(path, names):
        save_file({n: TENSORS[n] for n in names}, path)

    sharded(folder, write, ".safetensors", "model.safetensors.index.json")


def torch_shards(folder):
    def write(path, names):
        write_torch_file(path, torch_tensors(names))

    sharded(folder, write, ".bin", "pytorch_model.bin.index.json")


def wrapped(folder):
    write_torch_file(folder / BIN, torch_tensors(prefix="module."))


def compiled(folder):
    write_torch_file(folder / BIN, torch_tensors(prefix="_orig_mod."))


NEEDS_TORCH = (one_file_of_torch, torch_shards, wrapped, compiled)
LAYOUTS = (one_safetensors, safetensors_shards, *NEEDS_TORCH)


def cases(functions, torch=NEEDS_TORCH):
    """Each as one case; those that write files of torch are part of the tests of extras."""
    marks = {function: pytest.mark.extras for function in torch}
    return [pytest.param(f, id=f.__name__, marks=marks.get(f, ())) for f in functions]


@pytest.mark.parametrize("layout", cases(LAYOUTS))
def test_every_layout_gives_the_same_tensors(layout, tmp_path):
    layout(tmp_path)
    read = read_checkpoint(tmp_path)
    assert read.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(read[name], array, err_msg=name)


@pytest.mark.extras
def test_a_file_of_deepspeed_is_read_by_its_name(tmp_path):
    path = tmp_path / "global_step10" / "mp_rank_00_model_states.pt"
    write_states(path, torch_tensors())
    np.testing.assert_array_equal(read_checkpoint(path)[NAMES[0]], TENSORS[NAMES[0]])


def test_a_folder_of_several_layouts_gives_what_the_library_would_take(tmp_path):
    safetensors_shards(tmp_path)
    embedding = read_release(tmp_path, MODEL).params["embedding"][...]
    np.testing.assert_array_equal(embedding, TENSORS["model.embed_tokens.weight"])
    save_file({"only": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    assert list(read_checkpoint(tmp_path)) == ["only"]


def test_a_terminal_sees_how_many_arrays_are_read_and_converted(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(status_line, "_SECONDS", -1.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    one_safetensors(tmp_path)
    with status_line.progress_shown("Reading ..."):
        read_release(tmp_path, MODEL)
    shown = capsys.readouterr().err
    for done in ("read", "converted"):
        assert f"arrays {done}: {len(NAMES) - 1}/{len(NAMES)} " in shown


def no_files(folder):
    (folder / "config.json").write_text("{}")


def lost_shard(folder):
    safetensors_shards(folder)
    (folder / "part-1.safetensors").unlink()


def doubled(folder):
    safetensors_shards(folder)
    save_file(TENSORS, folder / "part-1.safetensors")


def zero_3(folder):
    torch = pytest.importorskip("torch")
    write_states(folder / BIN, {"a": torch.zeros(0)})


def number_in_the_model(folder):
    write_states(folder / BIN, {"a": 1.5})


def object_in_the_file(folder):
    content = {"module": torch_tensors(), "x": argparse.Namespace(x=1)}
    write_torch_file(folder / BIN, content)


def cut_short(folder):
    one_file_of_torch(folder)
    path = folder / BIN
    path.write_bytes(path.read_bytes()[:-100])


def command(folder):
    class Command:
        def __reduce__(self):
            return os.mkdir, (str(folder / "called"),)

    write_torch_file(folder / BIN, {"a": Command()})


REFUSED = {
    no_files: r"holds none of model\.safetensors, .*mp_rank_00_model_states\.pt",
    lost_shard: r"names 'part-1\.safetensors', which is not in",
    doubled: "holds it, and so does another file",
    zero_3: "tensor 'a' is empty, as where ZeRO stage 3.*run DeepSpeed's zero_to_fp32",
    number_in_the_model: "holds 'a', which is not a tensor; save the model's state_dict",
    object_in_the_file: r"model\.bin holds a argparse\.Namespace, no tensor; where torch is, save",
    cut_short: r"model\.bin is damaged \(.*; where torch is, save the tensors alone",
    command: r"model\.bin holds a \w+\.mkdir, no tensor",
}


@pytest.mark.parametrize(
    "damage",
    cases(REFUSED, (zero_3, number_in_the_model, object_in_the_file, cut_short, command)),
)
def test_what_is_no_whole_checkpoint_is_refused(damage, tmp_path):
    damage(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=REFUSED[damage]) as error:
        read_checkpoint(tmp_path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "called").exists()


def test_a_file_of_torch_without_torch_says_how_to_convert_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ImportError, match=r"model\.bin is a file of torch, .*safetensors") as error:
        read_checkpoint(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.extras
def test_views_and_small_floats_of_torch_come_out_as_they_were(tmp_path):
    torch = pytest.importorskip("torch")
    table = torch.arange(12.0).reshape(3, 4)
    half = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    write_torch_file(tmp_path / "a.bin", {"t": table.T, "view": table[1:, ::2], "half": half})
    read = read_checkpoint(tmp_path / "a.bin")
    np.testing.assert_array_equal(read["t"], np.arange(12.0).reshape(3, 4).T)
    np.testing.assert_array_equal(read["view"], [[4, 6], [8, 10]])
    np.testing.assert_array_equal(read["half"], np.float32([1.5, -2]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lact"}, "model_type='lact' is not 'qwen3_next_mem'"),
        ({"fwpkm_before_attn": False}, "fwpkm_before_attn=False: only True is known"),
        ({"fwpkm_query_src": "key"}, "fwpkm_query_src='key': only 'hidden' is known"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': only 'silu' is known"),
        ({"attention_bias": True}, "attention_bias=True: only False is known"),
        ({"fwpkm_compress_value": "rms"}, "fwpkm_compress_value='rms' is none of null, zero_mean"),
        ({"fwpkm_variant": "rnn"}, "fwpkm_variant='rnn' is none of pkm, mlp"),
        ({"fwpkm_loss_type": "mae"}, "fwpkm_loss_type='mae' is none of mse"),
        ({"fwpkm_addr_loss": None}, "nothing moves the keys"),
        ({"fwpkm_layers": [9]}, r"memory_layers=\(9,\) must be distinct layers"),
        ({"pkm_layers": "0"}, "pkm_layers='0' must be a list of layers"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"fwpkm_topk": 0}, "fwpkm_topk=0 must be an integer from 1"),
    ],
)
def test_a_configuration_that_is_not_known_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        release_config(CONFIG | changes)


def test_a_configuration_is_read_as_their_code_reads_it():
    assert MODEL.mixers == ("gdn", "swa", "attention")
    assert (MODEL.window, MODEL.pkm.value_dim, MODEL.fast_weight.chunk_size) == (4, 8, 8)
    rule = MODEL.fast_weight.rule
    assert rule.lookahead == 1  # fwpkm_target_lookahead, a slip of the files, is not read.
    least = {"model_type": "qwen3_next_mem", "num_hidden_layers": 4, "hidden_size": 64}
    plain = release_config(least)
    assert plain.mixers == ("gdn", "gdn", "gdn", "attention")
    assert (plain.memory_layers, plain.pkm_layers, plain.norm_eps) == ((), (), 1e-6)
    assert release_config(least | {"sliding_window": 9}).mixers[3] == "swa"
    changes = {"fwpkm_compress_value": None, "fwpkm_qk_score_type": "dot_product"}
    changed = release_config(CONFIG | changes | {"fwpkm_mem_grad_to_values_only": False})
    assert changed.fast_weight.value_norm == "none"
    assert (changed.fast_weight.rule.score, changed.fast_weight.rule.key_loss) == ("dot", "both")
    dense = release_config(CONFIG | {"fwpkm_variant": "mlp", "fwpkm_grad_clip": True})
    assert not dense.fast_weight.weight_by_gate
    assert (dense.fast_weight.rule.hidden_dim, dense.fast_weight.rule.write_clip) == (4, 1.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
@pytest.mark.parametrize("layout", cases((one_safetensors, safetensors_shards)))
def test_a_name_of_the_hub_becomes_a_run_that_keeps_its_commit(
    layout,
    hub,  # noqa: F811
    tmp_path,
    capsys,
):
    folder = tmp_path / "model"
    folder.mkdir()
    layout(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    paths = [x for x in folder.rglob("*") if x.is_file()]
    files = {str(x.relative_to(folder)): x.read_bytes() for x in paths}
    commit = hub.commit("SakanaAI/tiny", files)
    hub.commit("SakanaAI/tiny", {"config.json": b"{}"})
    code, said = run(
        capsys, "import", "release", "SakanaAI/tiny", tmp_path / "run", "--revision", commit
    )
    assert code == 0, said
    assert f"Fetched SakanaAI/tiny at {commit}." in said
    kept = json.loads((tmp_path / "run" / "release" / "hub.json").read_text())
    assert kept == {"name": "SakanaAI/tiny", "revision": commit}
    loaded = load_run(tmp_path / "run")
    assert loaded.experiment.model == MODEL
    np.testing.assert_array_equal(
        loaded.params["embedding"][...], TENSORS["model.embed_tokens.weight"]
    )
    assert run(capsys, "import", "release", folder, tmp_path / "local")[0] == 0


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_what_cannot_be_imported_ends_in_one_line(hub, tmp_path, capsys):  # noqa: F811
    hub.commit("SakanaAI/none", {"config.json": json.dumps(CONFIG).encode()})
    other = tmp_path / "other"
    other.mkdir()
    one_safetensors(other)
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    one_safetensors(wrong)
    (wrong / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 29}))
    for arguments, message in (
        (("SakanaAI/none",), "has none of model.safetensors, model.safetensors.index.json"),
        (("SakanaAI/absent",), "no folder here and no model of http"),
        ((other,), "config.json does not exist, which would say what model"),
        ((other, "--revision", "main"), "revision='main' is of a model on the hub"),
        ((wrong,), "model.embed_tokens.weight' has the shape [30, 8]"),
    ):
        source, *options = arguments
        code, said = run(capsys, "import", "release", source, tmp_path / "run", *options)
        assert code == 2
        assert message in said
        assert said.count("\n") == 1
        assert not (tmp_path / "run").exists()
