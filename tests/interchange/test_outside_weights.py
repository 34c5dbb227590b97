"""Weights from outside: each fault is refused by name before anything is written or allocated."""

import json
import resource
import struct
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fwpkm_jax.cli import main
from fwpkm_jax.config_json import to_json
from fwpkm_jax.interchange import Weights, export_run, read_folder, start_run
from fwpkm_jax.interchange.hf import open_folder, read_weights
from fwpkm_jax.io.safetensors import SafetensorsFile
from fwpkm_jax.io.untrusted import OutsideFileError
from fwpkm_jax.paper.release import from_release, read_release, to_release
from tests.interchange.test_weights import MODEL, weights_of

QWEN = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}


def qwen_tensors(value=None):
    """A Qwen3 of one layer; every number is `value`, or drawn."""
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (300, 8),
        "model.norm.weight": (8,),
        "lm_head.weight": (300, 8),
        f"{layer}input_layernorm.weight": (8,),
        f"{layer}post_attention_layernorm.weight": (8,),
        f"{layer}self_attn.q_proj.weight": (8, 8),
        f"{layer}self_attn.k_proj.weight": (4, 8),
        f"{layer}self_attn.v_proj.weight": (4, 8),
        f"{layer}self_attn.o_proj.weight": (8, 8),
        f"{layer}self_attn.q_norm.weight": (4,),
        f"{layer}self_attn.k_norm.weight": (4,),
        f"{layer}mlp.gate_proj.weight": (12, 8),
        f"{layer}mlp.up_proj.weight": (12, 8),
        f"{layer}mlp.down_proj.weight": (8, 12),
    }
    rng = np.random.default_rng(0)
    return {
        name: (
            rng.normal(size=shape).astype(np.float32)
            if value is None
            else np.full(shape, value, np.float32)
        )
        for name, shape in shapes.items()
    }


def qwen_folder(folder, tensors=None, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN | config))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    return folder


def sharded(folder, tensors):
    """Two files and their index, as the transformers library writes them."""
    names = sorted(tensors)
    places = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return places


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.float64])
def test_a_number_that_is_not_finite_is_refused_and_its_tensor_named(tmp_path, bad, dtype, capsys):
    tensors = {name: x.astype(dtype) for name, x in qwen_tensors().items()}
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][3, 5] = bad
    folder, run = qwen_folder(tmp_path / "hf", tensors), tmp_path / "run"
    assert main(["import", "hf", str(folder), str(run)]) == 2
    error = capsys.readouterr().err
    assert f"model.safetensors, tensor '{name}' holds NaN or infinity in 1 of 96 numbers" in error
    assert error.count("\n") == 1
    assert not run.exists()


def test_every_importer_refuses_what_is_not_finite(tmp_path):
    weights = weights_of(MODEL)
    tensors = {name: np.array(x) for name, x in to_release(weights, MODEL).items()}
    name = "model.layers.1.fwpkm.values"
    tensors[name][0, 0] = np.nan
    with pytest.raises(OutsideFileError, match=rf"checkpoint, tensor '{name}' holds NaN"):
        from_release(tensors, MODEL)
    save_file({n: np.ascontiguousarray(x) for n, x in tensors.items()}, tmp_path / "a.safetensors")
    with pytest.raises(OutsideFileError, match=rf"a\.safetensors, tensor '{name}' holds NaN"):
        read_release(tmp_path / "a.safetensors", MODEL)


def test_a_run_is_not_started_with_weights_that_are_not_its_models(tmp_path):
    from tests.interchange.test_weights import load_config, replace

    experiment = replace(load_config("recall"), model=MODEL, run_dir=str(tmp_path / "run"))
    weights = weights_of(MODEL)
    named = weights.named()
    name = "params/blocks/1/mixer/q_proj/kernel"

    def changed(array):
        return weights.replaced(named | {name: array})

    broken = np.array(named[name])
    broken[0, 0] = np.inf
    for array, said in (
        (broken, "holds NaN or infinity"),
        (named[name].T[:, :4], "has the shape"),
        (np.full(named[name].shape, 1e300), "holds NaN or infinity"),
        (np.zeros(named[name].shape, np.int32), "holds int32; weights are"),
    ):
        with pytest.raises(ValueError, match=said) as error:
            start_run(experiment, changed(array))
        assert name in str(error.value)
        assert not (tmp_path / "run").exists()
    assert isinstance(weights, Weights)


def test_the_single_file_is_read_before_the_index_and_without_its_shards(tmp_path):
    """As transformers 5.24 chooses."""
    folder = qwen_folder(tmp_path / "hf", qwen_tensors(2.0))
    places = sharded(folder, qwen_tensors(1.0))
    embedding = "params/embedding"
    assert np.all(np.asarray(read_weights(open_folder(folder)).named()[embedding]) == 2)
    for file in set(places.values()):
        (folder / file).unlink()
    assert np.all(np.asarray(read_weights(open_folder(folder)).named()[embedding]) == 2)
    sharded(folder, qwen_tensors(1.0))
    (folder / "model.safetensors").unlink()
    assert np.all(np.asarray(read_weights(open_folder(folder)).named()[embedding]) == 1)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 5\n" % 7


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"model.safetensors": POINTER}, r"model\.safetensors is a git-lfs pointer.*git lfs pull"),
        ({"model-00001-of-00002.safetensors": b""}, "which says what is in which file; fetch the"),
        ({"pytorch_model.bin": b""}, r"as pytorch_model\.bin alone.*save_pretrained"),
        ({"pytorch_model.bin.index.json": b"{}"}, r"as pytorch_model\.bin alone"),
        ({}, r"does not exist, and no model\.safetensors\.index\.json is there"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors"}}'},
            "names 'model-1.safetensors', which is not in",
        ),
        ({"model.safetensors.index.json": POINTER}, r"index\.json is a git-lfs pointer"),
        ({"model.safetensors.index.json": b"[]"}, r"index\.json is \[\]; a JSON object"),
        ({"model.safetensors.index.json": b'{"weight_map": null}'}, "no weight_map"),
        ({"model.safetensors.index.json": b'{"weight_map": ["a"]}'}, "no weight_map"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": null}}'}, "names None, which is"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "../x"}}'}, "is no file of the"),
        ({"config.json": POINTER}, r"config\.json is a git-lfs pointer"),
        ({"config.json": b"[" * 10**6}, r"config\.json is damaged: it is nested too deeply"),
    ],
)
def test_what_is_missing_or_in_its_place_is_named(tmp_path, files, said):
    folder = qwen_folder(tmp_path / "hf")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises((OutsideFileError, FileNotFoundError), match=said) as error:
        open_folder(folder)
    assert "\n" not in str(error.value)


def test_a_tensor_in_two_files_or_under_two_names_is_refused(tmp_path):
    tensors = qwen_tensors()
    folder = qwen_folder(tmp_path / "hf")
    places = sharded(folder, tensors)
    index = folder / "model.safetensors.index.json"
    first = sorted(places)[0]
    wrong = {"weight_map": places | {first: sorted(set(places.values()))[1]}}
    index.write_text(json.dumps(wrong))
    with pytest.raises(OutsideFileError, match=r"stands in model-00001.*index says model-00002"):
        open_folder(folder)
    second = folder / "model-00002-of-00002.safetensors"
    save_file(load_file(second) | {first: tensors[first]}, second)
    with pytest.raises(OutsideFileError, match="holds it, and so does model-0000"):
        open_folder(folder)
    wrapped = tensors | {"model.language_model.norm.weight": tensors["model.norm.weight"]}
    with pytest.raises(OutsideFileError, match="which are the same weights"):
        open_folder(qwen_folder(tmp_path / "two", wrapped))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_hidden_layers": 2**31}, "num_hidden_layers=2147483648 must be an integer from 1"),
        ({"num_hidden_layers": 9_999}, "num_hidden_layers=9999, and the files hold 14 tensors"),
        ({"vocab_size": 2**40}, "vocab_size=1099511627776 must be an integer"),
        ({"hidden_size": "8"}, "hidden_size='8' must be an integer"),
        ({"hidden_size": [8]}, r"hidden_size=\[8\] must be an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be an integer from 1"),
        ({"num_attention_heads": True}, "num_attention_heads=True must be an integer"),
        ({"head_dim": -4}, "head_dim=-4 must be an integer"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x' must be a finite number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a finite number"),
        ({"rms_norm_eps": 1e300}, r"rms_norm_eps=1e\+300 must be a finite number"),
        ({"rope_theta": {}}, r"rope_theta=\{\} must be a finite number"),
        ({"rope_scaling": 3}, "rope_scaling=3 must be an object"),
        ({"rope_scaling": {"type": ["yarn"]}}, r"rope_type=\['yarn'\] is none of"),
        ({"rope_scaling": {"type": "yarn", "factor": "a"}}, "factor='a' must be a finite number"),
        ({"layer_types": 5}, "layer_types=5 must be a list of names"),
        ({"layer_types": [["full_attention"]]}, "must be a list of names"),
        ({"hidden_act": ["silu"]}, r"hidden_act=\['silu'\] is none of"),
        ({"attention_bias": "no"}, "attention_bias='no' must be true or false"),
        ({"model_type": ["qwen3"]}, r"model_type=\['qwen3'\] must be a name"),
        ({"model_type": "qwen3_5", "text_config": [1]}, r"text_config=\[1\] must be an object"),
        ({"model_type": "qwen3_next", "full_attention_interval": 0}, "full_attention_interval=0"),
        ({"model_type": "qwen3_next", "num_experts": 2**31 - 1}, "num_experts=2147483647 must"),
        (
            {"model_type": "qwen3_next", "num_hidden_layers": 4, "head_dim": 8},
            "num_experts=512 in 4 layers",
        ),
        ({"model_type": "qwen3_next", "decoder_sparse_step": 0}, "decoder_sparse_step=0 must"),
        ({"fwpkm_jax": 1}, "fwpkm_jax=1 must be an object with a model"),
        (
            {"fwpkm_jax": {"model": to_json(replace(MODEL, mixers=("retnet",) * 3))}},
            "note of memories describes another",
        ),
    ],
)
def test_a_configuration_that_lies_is_refused_before_anything_is_made(tmp_path, config, said):
    folder = qwen_folder(tmp_path / "hf", qwen_tensors(), **config)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(OutsideFileError, match=said) as error:
        open_folder(folder)
    assert str(folder / "config.json") in str(error.value)
    assert "\n" not in str(error.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # In KiB.


def written(path, header, data=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape, offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,4]}}', 4, "the shape [inf]"),
        (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', 4, "the shape [nan]"),
        (b'{"a":' + b"[" * 200_000, 0, "nested too deeply"),
        (b"null", 0, "a JSON object is expected"),
        (b"[1]", 0, "a JSON object is expected"),
        ({"a": None}, 0, "has no description"),
        ({"a": [1]}, 0, "has no description"),
        ({"a": entry([1.0], [0, 4])}, 4, "the shape [1.0]"),
        ({"a": entry([True], [0, 4])}, 4, "the shape [True]"),
        ({"a": entry([-1], [0, 4])}, 4, "the shape [-1]"),
        ({"a": entry("1", [0, 4])}, 4, "the shape 1"),
        ({"a": entry([2**62], [0, 4])}, 4, "the shape [4611686018427387904]"),
        ({"a": entry([1] * 33, [0, 4])}, 4, "the shape [1, 1"),
        ({"a": entry([2**31, 2**31], [0, 4])}, 4, "damaged or cut short"),
        ({"a": entry([2], [-8, 0])}, 8, "data_offsets [-8, 0]"),
        ({"a": entry([1], [4, 0])}, 4, "data_offsets [4, 0]"),
        ({"a": entry([1], [0])}, 4, "data_offsets [0]"),
        ({"a": entry([1], None)}, 4, "data_offsets None"),
        ({"a": entry([1], [0, 4], None)}, 4, "dtype 'None'"),
        ({"a": entry([3], [0, 12])}, 8, "damaged or cut short"),
        ({"a": entry([1], [0, 4]), "b": entry([1], [0, 4])}, 4, "overlaps the tensor before it"),
        ({"a": entry([2], [0, 8]), "b": entry([2], [4, 12])}, 12, "overlaps the tensor before"),
        ({"a": entry([1], [4, 8])}, 8, "leaves a gap behind the tensor before it"),
        ({"a": entry([1], [0, 4])}, 9, "has 5 bytes behind its last tensor"),
        (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', 0, "names 'a' twice"),
        ({"__metadata__": {"a": 1}}, 0, "holds other values than texts"),
        ({"__metadata__": ["a"]}, 0, "holds other values than texts"),
    ],
)
def test_a_safetensors_file_that_lies_is_refused(tmp_path, header, data, said):
    path = written(tmp_path / "a.safetensors", header, b"\0" * data)
    with pytest.raises(OutsideFileError) as error:
        SafetensorsFile(path)
    assert said in str(error.value)
    assert str(error.value).startswith(f"{path}")
    assert str(error.value).endswith("; fetch it again.")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("length", [0, 1, 2**24 + 1, 2**63, 10**6])
def test_a_header_of_another_length_than_the_file_is_refused(tmp_path, length):
    path = written(tmp_path / "a.safetensors", {}, length=length)
    with pytest.raises(OutsideFileError, match="is damaged, or no safetensors file"):
        SafetensorsFile(path)
    with pytest.raises(OutsideFileError, match="is a directory"):
        SafetensorsFile(tmp_path)


def test_a_safetensors_file_gives_what_the_library_gives(tmp_path):
    rng = np.random.default_rng(0)
    kinds = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_)
    tensors = {str(i): rng.normal(size=(3, i)).astype(kind) for i, kind in enumerate(kinds)}
    tensors["scalar"] = np.asarray(2, np.float32)
    path = tmp_path / "a.safetensors"
    save_file(tensors, path, metadata={"format": "x"})
    file, expected = SafetensorsFile(path), load_file(path)
    assert file.metadata == {"format": "x"}
    assert set(file) == set(expected)
    for name, array in expected.items():
        assert file.read(name).dtype == array.dtype
        np.testing.assert_array_equal(file.read(name), array)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(OutsideFileError, match="lost its end since it was opened"):
        [file.read(name) for name in file]


@pytest.mark.slow
def test_an_exported_folder_whose_weights_are_changed_is_refused(tmp_path):
    from tests.interchange.test_weights import load_config, replace

    experiment = replace(load_config("recall"), model=MODEL, run_dir=str(tmp_path / "run"))
    start_run(experiment, weights_of(MODEL))
    out = export_run(tmp_path / "run", tmp_path / "out")
    path = out / "weights.safetensors"
    whole_file = load_file(path)
    name = "memory/layer_1/values"
    for change, said in (
        (lambda x: np.full_like(x, np.nan), "holds NaN or infinity"),
        (lambda x: x.astype(np.int32), "holds int32, and weights are"),
        (lambda x: x[..., :-1], "has the shape"),
    ):
        changed = whole_file | {name: np.ascontiguousarray(change(whole_file[name]))}
        save_file(changed, path, metadata={"format": "fwpkm_jax 1"})
        with pytest.raises(OutsideFileError, match=said) as error:
            read_folder(out)
        assert f"{path}, tensor '{name}'" in str(error.value)
    save_file(whole_file, path, metadata={"format": "fwpkm_jax 1"})
    _, read = read_folder(out)
    jax.tree.map(np.testing.assert_array_equal, read.params, weights_of(MODEL).params)


def test_numbers_too_large_for_the_dtype_are_refused(tmp_path):
    tensors = {name: x.astype(np.float64) for name, x in qwen_tensors().items()}
    tensors["model.norm.weight"][0] = 1e300
    folder = qwen_folder(tmp_path / "hf", tensors)
    with pytest.raises(
        OutsideFileError, match=r"'model.norm.weight' holds numbers above 3.4e\+38.*32 can hold"
    ):
        read_weights(open_folder(folder))
    large = qwen_tensors()
    large["lm_head.weight"][0, 0] = 3.4e38
    folder = qwen_folder(tmp_path / "two", large)
    with pytest.raises(
        OutsideFileError, match=r"above 3.39e\+38, the most of bfloat16; choose --dtype f"
    ):
        read_weights(open_folder(folder, dtype="bfloat16"))
    assert read_weights(open_folder(folder)) is not None


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused_at_the_import(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    from tests.data.chat_tokenizer import save_tokenizer

    tensors = {n: x[:260] if x.shape[0] == 300 else x for n, x in qwen_tensors().items()}
    folder = qwen_folder(tmp_path / "hf", tensors, vocab_size=260)
    path = save_tokenizer(folder)
    assert main(["import", "hf", str(folder), str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert f"{path} has ids up to" in error
    assert "the embedding beside it has 260 rows" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
