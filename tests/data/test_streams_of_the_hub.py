"""Data sets of the hub, through its own client, from a small hub on this machine."""

import json
import re

import pytest

from fwpkm_jax.data import make_dataset
from tests.data.test_streams import EOS, TEXTS, TOKENS, batches_of, config_of, parquet_bytes
from tests.data.test_streams import tokens_of as rows_of
from tests.interchange.small_hub import TOKEN, a_small_hub

pytest.importorskip("huggingface_hub")
NAME = "datasets/somebody/tiny"
ADDRESS = f"hf://{NAME}"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with a_small_hub(tmp_path, monkeypatch) as small:
        yield small


@pytest.fixture
def files(hub):
    """A data set of two shards and a test split."""
    shards = {
        f"data/train-0000{n}-of-00002.parquet": parquet_bytes(TEXTS[n * 75 : (n + 1) * 75])
        for n in range(2)
    }
    files = {"README.md": b"# Tiny", **shards, "data/test-00000-of-00001.parquet": b"not read"}
    hub.commit(NAME, files)
    return files


def downloads(hub):
    return [x for x in hub.asked if re.match(r"GET .*/resolve/.*parquet", x)]


def test_shards_are_fetched_one_by_one_as_they_are_read(hub, files):
    config = config_of("none", valid_paths=(f"{ADDRESS}/data/train-*",))
    batches = iter(make_dataset(config, split="valid", batch_size=1, seed=0))
    assert downloads(hub) == []
    first = rows_of(batches, 1)
    assert len(downloads(hub)) == 1
    tokens = first + rows_of(batches, len(TOKENS) // 10 - 1)
    assert tokens == TOKENS[: len(tokens)]
    assert len(downloads(hub)) == 2


def test_a_lost_connection_is_gone_on_with(hub, files):
    hub.cuts = 1
    batches = batches_of(config_of(f"{ADDRESS}/data/train-00000-of-00002.parquet"))
    expected = [token for text in TEXTS[:75] for token in (*text.encode(), EOS)]
    assert rows_of(batches, 20) == expected[:400]
    assert any(x.startswith("from byte") for x in hub.asked)


@pytest.mark.thorough
def test_a_run_goes_on_with_the_commit_that_it_names_and_refuses_another(hub, files, caplog):
    commit = hub.repositories[NAME][-1][0]
    pinned = config_of(f"{ADDRESS}@{commit}/data/train-*", window=8)
    newest = config_of(f"{ADDRESS}/data/train-*", window=8)
    states = {}
    for name, config in {"pinned": pinned, "newest": newest}.items():
        caplog.clear()
        batches = batches_of(config)
        next(batches)
        states[name] = json.loads(json.dumps(batches.get_state()))
        assert (f"is now commit {commit}" in caplog.text) == (name == "newest")
    expected = rows_of(batches, 40)
    changed = "data/train-00001-of-00002.parquet"
    hub.commit(NAME, {**files, changed: parquet_bytes(["other"] * 75)})
    again = batches_of(pinned)
    again.set_state(states["pinned"])
    assert rows_of(again, 40) == expected
    with pytest.raises(ValueError, match=r"train-00001-of-00002\.parquet has other content"):
        batches_of(newest).set_state(states["newest"])


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        (ADDRESS, ValueError, r"holds several splits, as .*; name one, as hf://.*/data/train\*"),
        (f"{ADDRESS}/none/*", ValueError, r"none/\* is no file of the data set, only README"),
        (f"{ADDRESS}@v9/data", ValueError, "somebody/tiny has no revision 'v9'"),
        ("hf://datasets/a/none/x", ValueError, "a/none is no data set of .* that you may read"),
        ("hf://datasets/a/gated/x", OSError, "a/gated is gated: accept its terms"),
    ],
    ids=["splits", "pattern", "revision", "missing", "gated"],
)
def test_what_the_hub_does_not_have_is_refused_by_name(hub, files, address, error, message):
    hub.commit("datasets/a/gated", {"x.txt": b"text"})
    hub.gated.add("datasets/a/gated")
    with pytest.raises(error, match=message):
        batches_of(config_of(address))


def test_a_private_data_set_is_read_with_the_clients_login(hub, files, monkeypatch):
    hub.private.add(NAME)
    with pytest.raises(ValueError, match="log in with `hf auth login` if it is private"):
        batches_of(config_of(f"{ADDRESS}/data/train-*"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert len(rows_of(batches_of(config_of(f"{ADDRESS}/data/train-*")), 1)) == 20


def test_a_commit_that_is_no_hash_never_becomes_a_path(hub, files):
    hub.repositories[NAME][-1] = ("../../outside", files)
    with pytest.raises(ValueError, match=r"has the commit '../../outside' at this hub, not 40"):
        batches_of(config_of(f"{ADDRESS}/data/train-*"))
    assert downloads(hub) == []


def test_no_error_prints_a_password(hub, files, monkeypatch):
    client = pytest.importorskip("huggingface_hub")
    secret = "http://bob:hunter2@127.0.0.1:9/?token=hunter2"
    monkeypatch.setattr(client.constants, "ENDPOINT", secret)
    for address in (f"{ADDRESS}@none", "hf://datasets/a/none/x"):
        with pytest.raises((OSError, ValueError), match=r"http://127\.0\.0\.1:9/") as error:
            batches_of(config_of(address))
        assert "hunter2" not in str(error.value)
    with pytest.raises(ValueError, match=r"'https://host/x\.jsonl' is an addr") as error:
        config_of("https://bob:hunter2@host/x.jsonl")
