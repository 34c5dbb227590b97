"""Models of the hub, through its own client, from a small hub on this machine."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fwpkm_jax.cli import program
from fwpkm_jax.evaluation import EVALS
from fwpkm_jax.interchange.hf import model_config
from fwpkm_jax.interchange.hf.families import FAMILIES
from fwpkm_jax.interchange.hf.layout import parts
from fwpkm_jax.run.load import IMPORTED
from tests.interchange.small_hub import TOKEN, a_small_hub

PINNED = Path(__file__).parents[1] / "evaluation" / "pinned_results.json"
# The client passes an open file by the old name of httpx's argument.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
NAME = "somebody/tiny-model"
TEXT = {
    "model_type": "qwen3", "vocab_size": 12, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
    "tie_word_embeddings": True, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that the client asks, with an empty cache; nobody is logged in."""
    with a_small_hub(tmp_path, monkeypatch) as small:
        yield small


@pytest.fixture
def logged_in(hub, monkeypatch):
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


@pytest.mark.slow
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
    card = (tmp_path / "run_out" / "README.md").read_text()
    assert NAME in card
    assert NAME not in (tmp_path / "from_folder_out" / "README.md").read_text()
    for file in set(files[0]) - {"README.md"}:
        one, other = (tmp_path / f"{n}_out" / file for n in ("run", "from_folder"))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_the_single_file_is_fetched_where_there_is_one_beside_an_index(
    hub, model, tmp_path, capsys
):
    tensors = {}
    for file in model.glob("model-*.safetensors"):
        tensors |= load_file(file)
    save_file(tensors, model / "model.safetensors")
    hub.add_folder(NAME, model)
    code, said = run(capsys, "import", "hf", NAME, tmp_path / "run")
    assert code == 0, said
    assert any(line.endswith("/model.safetensors") for line in hub.asked)
    assert not any("-of-" in line for line in hub.asked)


@pytest.mark.slow
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
    assert "http://127.0.0.1:9 cannot be" in said
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


@pytest.mark.thorough(
    "somebody/absent-options0-somebody/absent is no folder here and no model of http"
)
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("somebody/absent", (), "somebody/absent is no folder here and no model of http"),
        ("somebody/hidden", (), "that you may read; check the name, or log in"),
        ("somebody/gated", (), "somebody/gated is gated: accept its terms at http"),
        (NAME, ("--revision", "v9"), f"{NAME} has no revision 'v9' at http"),
        ("somebody/torch", (), "has neither model.safetensors nor model.safetensors.index.json"),
        ("somebody/index", (), "has no weight_map of tensors to files; fetch the folder again."),
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


@pytest.mark.by_default(
    "sha-{mine}-has the commit '/",
    "sha-../../../mine-has the commit '../../../mine' at this hub, not 40 hexadecimal",
    "path-../../../../../mine-has the file '../../../../../mine' at this hub",
    "path-{mine}-has the file '/",
    "etag-{mine}-has ETag '/",
    "etag-../../../mine-has ETag '../../../mine' at this hub, which is no name of a",
    "commit-../../../../mine-has X-Repo-Commit '../../../../mine' at this hub",
    "commit-cccccccccccccccccccccccccccccccccccccccc-is of another commit than ",
    "body-?-and the hub states ",
    "large-config.json-config.json has 3,221,225,472 bytes, and at most 134,217,728",
)
@pytest.mark.parametrize(
    ("lie", "value", "message"),
    [
        ("sha", "{mine}", "has the commit '/"),
        ("sha", "../../../mine", "has the commit '../../../mine' at this hub, not 40 hexadecimal"),
        ("path", "../../../../../mine", "has the file '../../../../../mine' at this hub"),
        ("path", "{mine}", "has the file '/"),
        ("etag", "{mine}", "has ETag '/"),
        ("etag", "../../../mine", "has ETag '../../../mine' at this hub, which is no name of a"),
        ("commit", "../../../../mine", "has X-Repo-Commit '../../../../mine' at this hub"),
        ("commit", "c" * 40, "is of another commit than "),
        ("body", "?", "and the hub states "),
        ("large", "config.json", "config.json has 3,221,225,472 bytes, and at most 134,217,728"),
        ("endless", "config.json", "has more than 33,554,432 bytes at this hub; name another"),
        ("endless", "model-00002-of-00002.safetensors", "has more than 33,554,432 bytes at"),
        ("endless", "tree", "has more than 33,554,432 bytes at this hub; name another hub"),
        ("endless", "revision", "has more than 33,554,432 bytes at this hub; name another hub"),
    ],
)
def test_a_hub_that_lies_writes_nothing_outside_the_cache_and_makes_no_run(
    lie, value, message, hub, model, tmp_path, capsys
):
    (tmp_path / "mine").write_text("mine")
    before = {x for x in tmp_path.rglob("*") if "cache" not in x.parts}
    hub.add_folder(NAME, model)
    hub.lies[lie] = value.format(mine=tmp_path / "mine")
    code, said = run(capsys, "import", "hf", NAME, tmp_path / "run")
    assert code == 2
    assert message in said
    assert said.count("\n") == 1
    assert {x for x in tmp_path.rglob("*") if "cache" not in x.parts} == before
    assert (tmp_path / "mine").read_text() == "mine"
    hub.lies.clear()
    code, said = run(capsys, "import", "hf", NAME, tmp_path / "run")
    assert code == 0, said


@pytest.mark.slow
def test_another_commit_than_the_one_that_was_asked_for_is_refused(hub, model, tmp_path, capsys):
    old = hub.add_folder(NAME, model)
    hub.lies["sha"] = hub.add_folder(NAME, model)
    code, said = run(capsys, "import", "hf", NAME, tmp_path / "run", "--revision", old)
    assert code == 2
    assert f"has the commit {hub.lies['sha']} at this hub where {old} was asked for" in said
    code, said = run(capsys, "import", "hf", NAME, tmp_path / "run", "--revision", "../a")
    assert code == 2
    assert "revision='../a' is no branch, tag or commit." in said


@pytest.mark.slow
def test_a_hub_that_lies_after_a_lost_connection_is_refused_too(hub, model, tmp_path, capsys):
    from huggingface_hub import close_session

    hub.add_folder(NAME, model)
    hub.lies["etag"] = "../../../mine"
    assert run(capsys, "import", "hf", NAME, tmp_path / "run")[0] == 2
    close_session()  # As the client does when a connection fails.
    assert run(capsys, "import", "hf", NAME, tmp_path / "run")[0] == 2
    assert not (tmp_path / "mine").exists()


@pytest.mark.slow
def test_a_branch_in_the_cache_does_without_the_hub(hub, model, tmp_path, capsys, monkeypatch):
    commit = hub.add_folder(NAME, model)
    assert run(capsys, "import", "hf", NAME, tmp_path / "run")[0] == 0
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    code, said = run(capsys, "import", "hf", NAME, tmp_path / "again")
    assert code == 0, said
    assert f"Fetched {NAME} at {commit}." in said
    for file in (tmp_path / "cache").rglob("model-00002-*"):
        file.unlink()
    code, said = run(capsys, "import", "hf", NAME, tmp_path / "third")
    assert code == 2
    assert "http://127.0.0.1:9 cannot be asked" in said


@pytest.mark.slow
@pytest.mark.usefixtures("logged_in")
def test_a_run_is_pushed_with_its_card_and_comes_back_the_same(hub, model, tmp_path, capsys):
    commit = hub.add_folder(NAME, model)
    assert run(capsys, "import", "hf", NAME, tmp_path / "run")[0] == 0
    hub.commit("me/mine", {"model-00001-of-00009.safetensors": b"old", "notes.txt": b"stay"})
    code, said = run(capsys, "export", "hf", tmp_path / "run", "--push", "me/mine")
    assert code == 0, said
    pushed = hub.files("me/mine")
    assert f"wrote {hub.url}/me/mine/commit/{hub.repositories['me/mine'][-1][0]}" in said
    assert sorted(pushed) == ["README.md", "config.json", "model.safetensors", "notes.txt"]
    assert not [x for x in (tmp_path / "run").iterdir() if x.name.startswith("export_")]
    card = pushed["README.md"].decode()
    assert f'base_model: "{NAME}"' in card
    assert f"It began as [{NAME}](https://huggingface.co/{NAME}) at {commit}." in card
    assert "fwpkm import hf me/mine runs/model" in card
    assert "It has not been evaluated." in card
    assert str(tmp_path) not in card
    code, said = run(capsys, "import", "hf", "me/mine", tmp_path / "back")
    assert code == 0, said
    for name in ("run", "back"):
        assert run(capsys, "export", "hf", tmp_path / name, tmp_path / f"{name}_out")[0] == 0
    one, other = (tmp_path / f"{name}_out" / "model.safetensors" for name in ("run", "back"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.thorough
def test_a_push_that_cannot_be_is_refused_before_anything_is_written(hub, model, tmp_path, capsys):
    assert run(capsys, "import", "hf", model, tmp_path / "run")[0] == 0
    for options, message in (
        (("--push", "mine"), "push='mine' is no name of the hub; write owner/name."),
        (("--push", "me/mine"), f"Nobody is logged in at {hub.url}; log in with `hf auth login`."),
        ((), "FOLDER is missing: Folder to create; or --push owner/name."),
    ):
        code, said = run(capsys, "export", "hf", tmp_path / "run", *options)
        assert code == 2
        assert message in said
        assert said.count("\n") == 1
    assert not hub.repositories


@pytest.mark.slow
@pytest.mark.usefixtures("logged_in")
def test_a_card_holds_what_was_measured(hub, model, tmp_path, capsys):
    directory = tmp_path / "run"
    assert run(capsys, "import", "hf", model, directory)[0] == 0
    (directory / "results").mkdir()
    record = json.loads(PINNED.read_text())["recall"]["record"]
    record["provenance"]["checkpoint"]["step"] = 7
    (directory / "results" / "recall.json").write_text(json.dumps(record))
    (directory / "results" / "other.json").write_text("{}")
    assert run(capsys, "export", "hf", directory, tmp_path / "out", "--push", "me/mine")[0] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    evaluation = EVALS["recall"]
    for text in (evaluation.title, evaluation.finding(record), evaluation.table(record)):
        assert text in card
    assert "Measured of step 7, not of the step given here, on cpu with jax" in card
    assert "It is as it was imported, not trained further." in card
