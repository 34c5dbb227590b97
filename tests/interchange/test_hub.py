"""Models of the hub, through its own client, from a small hub on this machine."""

import json

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from fwpkm_jax.cli import program
from fwpkm_jax.interchange.hf import model_config
from fwpkm_jax.interchange.hf.families import FAMILIES
from fwpkm_jax.interchange.hf.layout import parts
from fwpkm_jax.run.load import IMPORTED
from tests.interchange.small_hub import TOKEN, SmallHub, serving

NAME = "somebody/tiny-model"
TEXT = {
    "model_type": "qwen3", "vocab_size": 12, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
    "tie_word_embeddings": True, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that the client asks, with an empty cache; nobody is logged in."""
    small = SmallHub()
    with serving(small):
        template = small.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": small.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_DISABLE_XET": True,
            "DOWNLOAD_CHUNK_SIZE": 64,
            "HF_HUB_DISABLE_PROGRESS_BARS": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield small


@pytest.fixture
def logged_in(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture
def model(tmp_path):
    """A folder of one layer in two files, beside files that an import does not read."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TEXT))
    rng, tensors = np.random.default_rng(0), {}
    for part in parts(model_config(TEXT), FAMILIES["qwen3"]).values():
        for name, shape in zip(part.names, part.shapes, strict=True):
            tensors[name] = rng.normal(0, 0.5, shape).astype(np.float32)
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[:3]}
    files["model-00002-of-00002.safetensors"] = names[3:]
    for file, inside in files.items():
        save_file({name: tensors[name] for name in inside}, folder / file)
    index = {name: file for file, inside in files.items() for name in inside}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for unread in ("pytorch_model.bin", "consolidated.safetensors", "README.md"):
        (folder / unread).write_bytes(b"not read")
    return folder


def run(capsys, *arguments):
    """A command's exit code and what it printed."""
    code = program.main([str(x) for x in arguments])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_a_name_is_fetched_at_one_commit_which_the_run_keeps(hub, model, tmp_path, capsys):
    commit = hub.add_folder(NAME, model)
    assert run(capsys, "import", "hf", model, tmp_path / "from_folder")[0] == 0
    code, said = run(capsys, "import", "hf", NAME, tmp_path / "run")
    assert code == 0, said
    assert f"Fetched {NAME} at {commit}." in said
    kept = tmp_path / "run" / IMPORTED
    assert json.loads((kept / "hub.json").read_text()) == {"name": NAME, "revision": commit}
    fetched = {line.rsplit("/", 1)[1] for line in hub.asked if line.startswith("GET /somebody")}
    assert fetched == {
        "config.json", "model.safetensors.index.json",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    }  # fmt: skip
    for name in ("from_folder", "run"):
        assert run(capsys, "export", "hf", tmp_path / name, tmp_path / f"{name}_out")[0] == 0
    files = [
        sorted(x.name for x in (tmp_path / f"{n}_out").iterdir()) for n in ("run", "from_folder")
    ]
    assert files[0] == files[1]
    for file in files[0]:
        one, other = (tmp_path / f"{n}_out" / file for n in ("run", "from_folder"))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.thorough
def test_an_older_commit_can_be_named_and_the_cache_does_without_the_hub(
    hub, model, tmp_path, capsys, monkeypatch
):
    old = hub.add_folder(NAME, model)
    hub.commit(NAME, {"config.json": b"{}"})
    code, said = run(capsys, "import", "hf", NAME, tmp_path / "old", "--revision", old)
    assert code == 0, said
    hub.repositories.clear()
    code, said = run(capsys, "import", "hf", NAME, tmp_path / "again", "--revision", old)
    assert code == 0, said
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    code, said = run(capsys, "import", "hf", "somebody/other", tmp_path / "none")
    assert code == 2
    assert "http://127.0.0.1:9 cannot be reached" in said
    assert said.count("\n") == 1


@pytest.mark.thorough
def test_a_lost_connection_is_taken_up_and_whole_files_are_fetched_once(
    hub, model, tmp_path, capsys
):
    hub.add_folder(NAME, model)
    hub.cuts = 1
    code, said = run(capsys, "import", "hf", NAME, tmp_path / "run")
    assert code == 0, said
    assert any(line.startswith("from byte ") for line in hub.asked)
    hub.asked.clear()
    code, said = run(capsys, "import", "hf", NAME, tmp_path / "again")
    assert code == 0, said
    assert not any("/resolve/" in line for line in hub.asked if line.startswith("GET"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("somebody/absent", (), "somebody/absent is no folder here and no model of http"),
        ("somebody/hidden", (), "that you may read; check the name, or log in"),
        ("somebody/gated", (), "somebody/gated is gated: accept its terms at http"),
        (NAME, ("--revision", "v9"), f"{NAME} has no revision 'v9' at http"),
        ("somebody/torch", (), "has no model.safetensors; only models with safetensors"),
        ("somebody/index", (), "key 'weight_map' names no files; choose another --revision."),
        ("MODEL", ("--revision", "main"), "revision='main' is of a model on the hub, and "),
    ],
)
def test_what_the_hub_refuses_ends_in_one_line(
    name, options, message, hub, model, tmp_path, capsys
):
    hub.add_folder(NAME, model)
    hub.add_folder("somebody/hidden", model)
    hub.private.add("somebody/hidden")
    hub.add_folder("somebody/gated", model)
    hub.gated.add("somebody/gated")
    config = json.dumps(TEXT).encode()
    hub.commit("somebody/torch", {"config.json": config, "pytorch_model.bin": b""})
    index = {"config.json": config, "model.safetensors.index.json": b'{"weight_map": [1]}'}
    hub.commit("somebody/index", index)
    name = model if name == "MODEL" else name
    code, said = run(capsys, "import", "hf", name, tmp_path / "run", *options)
    assert code == 2
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()
