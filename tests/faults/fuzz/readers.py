"""The readers of files from outside, with good files for each."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import random
import shutil
import threading
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fwpkm_jax.io.untrusted import OutsideFileError
from tests import loopback
from tests.faults.fuzz import damage

Damage = Callable[[bytes, random.Random], bytes]


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader.

    Attributes:
      good: makes its files in a folder.
      files: those that are damaged, one or several a time, and how.
      read: reads them as a command would.
      needs: a package that [dev] leaves out.
    """

    good: Callable[[Path], None]
    files: Mapping[str, Damage]
    read: Callable[[Path], Any]
    needs: str = ""


def _hf(folder: Path) -> None:
    from tests.interchange.test_outside_weights import qwen_folder, qwen_tensors

    qwen_folder(folder, qwen_tensors())


def _read_hf(folder: Path) -> None:
    from fwpkm_jax.interchange.hf import open_folder
    from fwpkm_jax.interchange.hf.model_folder import _checked

    found = open_folder(folder)
    for part in found.parts.values():
        part.pack(
            lambda n, part=part: _checked(found.files, found.stored[part.names[n]], np.float32)
        )


def _sharded(folder: Path) -> None:
    from tests.interchange.test_outside_weights import qwen_folder, qwen_tensors, sharded

    sharded(qwen_folder(folder), qwen_tensors())


_FAMILIES: tuple[dict[str, Any], ...] = (
    {},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    {"layer_types": ["full_attention"], "attention_bias": True, "mlp_bias": False},
    {
        "model_type": "llama",
        "rope_scaling": {
            "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    {
        "model_type": "qwen3_next", "num_hidden_layers": 2, "full_attention_interval": 2,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8, "mlp_only_layers": [0], "linear_num_key_heads": 2,
    },
    {"model_type": "qwen3_5", "text_config": {"num_hidden_layers": 4, "hidden_size": 8}},
    {"model_type": "olmo_hybrid", "rope_parameters": {"rope_theta": None}},
    {"model_type": "smollm3", "no_rope_layers": [1, 0], "sliding_window": 8},
    {
        "model_type": "gemma3", "vision_config": {},
        "text_config": {
            "sliding_window_pattern": 2, "query_pre_attn_scalar": 8, "rope_local_base_freq": 1e4,
            "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}},
        },
    },
    {"model_type": "qwen3_moe", "num_local_experts": 4, "num_experts_per_tok": 2},
    {"fwpkm_jax": {"model": {"class": "ModelConfig", "mixers": ["attention"]}}},
)  # fmt: skip


def _config(content: bytes, rng: random.Random) -> bytes:
    """The configuration of a family, changed; its weights are those of another one."""
    values = json.loads(content) | rng.choice(_FAMILIES)
    return damage.of_json(json.dumps(values).encode(), rng)


def _release(folder: Path) -> None:
    from tests.paper.test_release_layouts import CONFIG, one_safetensors

    folder.mkdir(exist_ok=True)
    one_safetensors(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))


def _read_release(folder: Path) -> None:
    from fwpkm_jax.io.untrusted import read_json, reading
    from fwpkm_jax.paper.release.layouts import read_checkpoint
    from fwpkm_jax.paper.release.release_config import release_config

    read_checkpoint(folder)
    values = read_json(folder / "config.json", kind=dict)
    with reading(folder / "config.json"):
        release_config(values)


def _tokenizer(folder: Path) -> None:
    from tests.data.chat_tokenizer import save_tokenizer

    folder.mkdir(exist_ok=True)
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 3}))


def _read_tokenizer(folder: Path) -> None:
    from fwpkm_jax.data import load_tokenizer

    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("the cat and the hat \x00 \U0001f600 " * 20)
    tokenizer.decode(ids)


def _read_chat(folder: Path) -> None:
    from fwpkm_jax.data import load_tokenizer

    tokenizer: Any = load_tokenizer(str(folder / "tokenizer.json"))
    tokenizer.write_chat([{"role": "user", "content": "the cat"}])


def _chat(folder: Path) -> None:
    from tests.data.chat_tokenizer import TEMPLATE

    _tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _sentencepiece(folder: Path) -> None:
    from fwpkm_jax.data.tokenizers import mistral_v1_model

    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(mistral_v1_model())


def _read_sentencepiece(folder: Path) -> None:
    from fwpkm_jax.data import load_tokenizer

    tokenizer = load_tokenizer(str(folder / "tokenizer.model"))
    tokenizer.decode(tokenizer.encode("the cat and the hat \U0001f600"))


def _tokens(folder: Path) -> None:
    from tests.data.plain_writer import write_token_file

    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    entries = [rng.integers(0, 300, n) for n in (5, 0, 70, 1)]
    write_token_file(folder / "a.bin", entries, vocab_size=300)


def _table() -> Any:
    import pyarrow

    return pyarrow.table({"text": [f"{n} text" * (n % 7) for n in range(90)], "n": range(90)})


def _parquet(folder: Path) -> None:
    from pyarrow import parquet

    folder.mkdir(exist_ok=True)
    parquet.write_table(_table(), folder / "a.parquet", row_group_size=40)


def _arrow(folder: Path) -> None:
    import pyarrow

    folder.mkdir(exist_ok=True)
    table = _table()
    with pyarrow.ipc.new_stream(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=40)
    with pyarrow.ipc.new_file(folder / "b.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=40)


def _read_columns(folder: Path) -> None:
    from fwpkm_jax.data.streams.files import data_files
    from fwpkm_jax.data.streams.formats import read_tokens
    from fwpkm_jax.data.tokenizers import ByteTokenizer

    for file in data_files(folder):
        for _ in read_tokens(file, ByteTokenizer(), field="text"):
            pass


def _read_tokens(folder: Path) -> None:
    from fwpkm_jax.data import TokenFile

    file = TokenFile(folder / "a.bin", vocab_size=300)
    for number in range(file.num_entries):
        file.entry(number)


def _run(folder: Path) -> None:
    from fwpkm_jax.config import Experiment
    from fwpkm_jax.data import RecallData
    from tests.evaluation.conftest import tiny_model_config
    from tests.evaluation.test_report import result, train, write_json

    experiment = Experiment(model=tiny_model_config(), data=RecallData(), run_dir=str(folder))
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", experiment.to_json())
    train(folder)
    write_json(folder / "results" / "recall.json", result(39))
    session = {
        "from_step": 0, "started": "2026", "commit": None, "device_count": 1, "device_kind": "cpu",
        "versions": {"jax": "1"}, "command": ["fwpkm"],
    }  # fmt: skip
    write_json(folder / "environment.json", {"fingerprint": "a", "sessions": [session]})


def _read_run(folder: Path) -> None:
    from fwpkm_jax.config import read_experiment

    read_experiment(folder)


def _read_report(folder: Path) -> None:
    from fwpkm_jax.evaluation.report import write_report

    write_report(folder)


@cache
def _memory_model() -> Any:
    from tests.memories.models import ONE, make_model, make_state

    model = make_model(ONE)
    return model, make_state(model)


def _memories(folder: Path) -> None:
    from fwpkm_jax import memories

    model, state = _memory_model()
    memories.save(folder, "alice", state, model=model)
    memories.fork(folder, "alice", "bob")


def _of_memory(content: bytes, rng: random.Random) -> bytes:
    """A saved memory with other bytes, another header, or other facts or numbers under a right
    checksum.
    """
    if rng.random() < 0.5:
        return damage.of_safetensors(content, rng)
    from safetensors.numpy import load, save

    from fwpkm_jax.memories.file import FORMAT, checksum

    length = int.from_bytes(content[:8], "little")
    facts = json.loads(content[8 : 8 + length])["__metadata__"]["facts"]
    try:
        changed = damage.of_json(facts.encode(), rng).decode()
    except UnicodeDecodeError:
        return content
    arrays = load(content)
    if rng.random() < 0.3:
        name = rng.choice(sorted(arrays))
        x = arrays[name]
        numbers = (0, 1, -1, 2**31 - 1, -(2**31)) if x.dtype.kind == "i" else (0.0, np.nan, np.inf)
        arrays[name] = np.full_like(x, rng.choice(numbers)) if x.dtype.kind in "if" else x[:0]
        changed = facts
    total = checksum(arrays, changed)
    return save(arrays, {"format": FORMAT, "checksum": total, "facts": changed})


def _read_memories(folder: Path) -> None:
    from fwpkm_jax import memories
    from fwpkm_jax.cli.memories_command import _list

    _list(folder)
    state = memories.load(folder, "bob", _memory_model()[0])
    jax.block_until_ready(state)


def audited() -> Any:
    """What an audit found in 72 answers."""
    from fwpkm_jax.audit.audit import Audit
    from fwpkm_jax.audit.origin import Answer, origin_lines

    answers = [
        Answer(
            run="a", document=n // 4, question=n % 4, condition=condition, depth=0.1 * (n % 9),
            distance=100 + n, reach=32, written=True, expected="1", answer="1" if n % 3 else "2",
            exact=bool(n % 3), forced=0.5, first=True, nats=0.3, chance=0.1, first_chance=0.1,
        )
        for n in range(24)
        for condition in ("written", "frozen", "reset")
    ]  # fmt: skip
    return Audit(origin_lines(answers), answers)


def bundle(folder: Path) -> None:
    """An audit's bundle."""
    from fwpkm_jax.audit.bundle import write_bundle

    write_bundle(folder, *audited(), title="t", provenance={"a": 1})


def _read_bundle(folder: Path) -> None:
    """With the right hashes, which anybody can compute."""
    from fwpkm_jax.audit.bundle import is_bundle, recomputed
    from fwpkm_jax.evaluation.sources import sha256

    manifest = folder / "manifest.json"
    try:
        values = json.loads(manifest.read_bytes())
        values["files"] = {name: sha256(folder / name) for name in values["files"]}
        manifest.write_text(json.dumps(values))
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError):
        pass  # The manifest itself is damaged.
    is_bundle(folder)
    recomputed(folder)


def _lines(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    texts = [json.dumps({"text": f"text {n}", "other": [n, {"a": None}]}) for n in range(40)]
    (folder / "a.jsonl").write_text("\n".join(texts))


def _read_lines(folder: Path) -> None:
    try:
        _read_columns(folder)
    except ValueError as error:  # A record without its text is no damage.
        raise error if isinstance(error, OutsideFileError) else _named(folder, error) from error


def _of_gzip(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return damage.of_bytes(content, rng)
    return gzip.compress(damage.of_lines(gzip.decompress(content), rng))


def _gzip(folder: Path) -> None:
    _lines(folder)
    path = folder / "a.jsonl"
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


def _zip(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    record = {
        "input": "What?", "context": "a text " * 50, "answers": ["a"], "length": 100,
        "language": "en", "_id": "1",
    }  # fmt: skip
    with zipfile.ZipFile(folder / "data.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/hotpotqa.jsonl", f"{json.dumps(record)}\n" * 20)


def _read_zip(folder: Path) -> None:
    from fwpkm_jax.data.longbench import read_samples

    try:
        for _ in read_samples(folder / "data.zip", "hotpotqa"):
            pass
    except ValueError as error:  # "neither a .jsonl file nor a zip archive".
        raise error if isinstance(error, OutsideFileError) else _named(folder, error) from error


def _named(folder: Path, error: Exception) -> OutsideFileError:
    """An error in one line that names something else than the folder, such as a model of a hub."""
    if "\n" in str(error):
        raise AssertionError("a message that is not one line") from error
    return OutsideFileError(folder, str(error))


def _versions(folder: Path) -> None:
    """Two checkpoints of a bucket, as objects in a folder."""
    from fwpkm_jax.storage.stores import Store
    from fwpkm_jax.storage.sync import Versions

    store = Store(f"memory://fuzz{folder}")
    source = folder / "source" / "params"
    source.mkdir(parents=True)
    (source / "x").write_bytes(b"x" * 100)
    versions = Versions(store, "checkpoints")
    for number in (2, 4):
        versions.write(number, source.parent, lambda: None)
    shutil.rmtree(source.parent)
    for name in store.sizes():
        path = folder / name.replace("/", "+")
        path.write_bytes(store.read(name))


def _read_versions(folder: Path) -> None:
    from fwpkm_jax.storage.stores import Store
    from fwpkm_jax.storage.sync import Versions

    store = Store(f"memory://fuzz{folder}")
    for name in store.sizes():
        store.remove(name)
    for path in folder.iterdir():
        store.write(path.name.replace("+", "/"), path.read_bytes())
    versions = Versions(store, "checkpoints")
    versions.look(store.sizes())
    for number in sorted(versions.whole):
        versions.fetch(number, folder / str(number))
    if versions.damaged:
        raise _named(folder, ValueError(next(iter(versions.damaged.values()))))


_HUB_FILE = b'{"model_type": "qwen3"}'


def _hub(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    digest = hashlib.sha256(_HUB_FILE).hexdigest()
    entry = {
        "type": "file", "path": "config.json", "size": len(_HUB_FILE), "oid": "a" * 40,
        "lfs": {"oid": digest, "size": len(_HUB_FILE), "pointerSize": 100},
    }  # fmt: skip
    answers = {
        "model.json": {"id": "o/m", "sha": "c" * 40, "siblings": [{"rfilename": "config.json"}]},
        "tree.json": [entry, {**entry, "path": "a/b.json", "lfs": None}],
        "headers.json": {"ETag": f'"{digest}"', "X-Repo-Commit": "c" * 40},
    }
    for name, values in answers.items():
        (folder / name).write_text(json.dumps(values))


class _HubAnswers(loopback.Handler):
    """Answers of a hub as a folder has them."""

    folder: Path

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if "/resolve/" in path:
            try:
                headers = json.loads((self.folder / "headers.json").read_bytes())
                headers = {str(name): str(value) for name, value in headers.items()}
                "".join([*headers, *headers.values()]).encode("latin-1")
            except (ValueError, AttributeError, RecursionError):
                headers = {}
            headers = {n: v for n, v in headers.items() if n.isprintable() and v.isprintable()}
            self._answer(200, _HUB_FILE, **headers)
        else:
            name = "tree.json" if "/tree/" in path else "model.json"
            self._answer(200, (self.folder / name).read_bytes(), Content_Type="application/json")

    do_HEAD = do_GET


@cache
def _hub_of(folder: Path) -> Any:
    """The client, which asks a server of this process about a folder."""
    from huggingface_hub import constants

    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Served", (_HubAnswers,), {"folder": folder})
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    constants.ENDPOINT = url
    constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_DISABLE_XET = True
    constants.HF_HUB_DISABLE_PROGRESS_BARS = True
    return constants


def _read_hub(folder: Path) -> None:
    from fwpkm_jax.interchange.hf.hub import HubFolder

    outside = folder.parent / "outside"
    outside.mkdir(exist_ok=True)
    _hub_of(folder).HF_HUB_CACHE = str(outside / "cache")
    shutil.rmtree(outside / "cache", ignore_errors=True)
    try:
        HubFolder("o/m").fetch(["*.json"])
    except (OSError, ValueError) as error:
        raise _named(folder, error) from error
    finally:
        assert {x.name for x in outside.iterdir()} <= {"cache"}, "written outside the cache"


def _gguf(folder: Path) -> None:
    from tests.interchange.gguf_writer import tensors_of, write_gguf

    folder.mkdir(exist_ok=True)
    write_gguf(folder / "model.gguf", "llama", tensors_of("llama"))


def _read_gguf(folder: Path) -> None:
    from fwpkm_jax.interchange.gguf import GGUFFile

    file = GGUFFile(folder / "model.gguf")
    for name in file:
        file.read(name)
    file.write_small_files(folder)


def _of_gguf(content: bytes, rng: random.Random) -> bytes:
    """Mostly in the header, which takes the smaller part of the file."""
    if rng.random() < 0.2:
        return damage.of_bytes(content, rng)
    return damage.of_bytes(content[:3000], rng) + content[3000:]


def _torch(folder: Path) -> None:
    import torch

    _release(folder)
    from safetensors.numpy import load_file

    path = folder / "model.safetensors"
    arrays = {name: torch.tensor(x) for name, x in load_file(path).items()}
    torch.save(arrays, folder / "pytorch_model.bin")
    path.unlink()


READERS: dict[str, Reader] = {
    "json lines": Reader(_lines, {"a.jsonl": damage.of_lines}, _read_lines),
    "gzip": Reader(_gzip, {"a.jsonl.gz": _of_gzip}, _read_lines),
    "zip": Reader(_zip, {"data.zip": damage.of_bytes}, _read_zip),
    "audit's bundle": Reader(
        bundle,
        {
            "answers.jsonl": damage.of_lines,
            "audit.json": damage.of_json,
            "manifest.json": damage.of_json,
        },
        _read_bundle,
    ),
    "checkpoints' markers": Reader(
        _versions,
        {"checkpoints+2.json": damage.of_json, "checkpoints+4.json": damage.of_json},
        _read_versions,
    ),
    "hub": Reader(
        _hub,
        {
            "model.json": damage.of_json,
            "tree.json": damage.of_json,
            "headers.json": damage.of_json,
        },
        _read_hub,
    ),
    "gguf": Reader(_gguf, {"model.gguf": _of_gguf}, _read_gguf, needs="gguf"),
    "torch": Reader(_torch, {"pytorch_model.bin": damage.of_bytes}, _read_release, needs="torch"),
    "safetensors": Reader(_hf, {"model.safetensors": damage.of_safetensors}, _read_hf),
    "index": Reader(_sharded, {"model.safetensors.index.json": damage.of_json}, _read_hf),
    "config.json": Reader(_hf, {"config.json": _config}, _read_hf),
    "release": Reader(
        _release,
        {"model.safetensors": damage.of_safetensors, "config.json": damage.of_json},
        _read_release,
    ),
    "tokenizer.json": Reader(_tokenizer, {"tokenizer.json": damage.of_json}, _read_tokenizer),
    "beside tokenizer.json": Reader(
        _tokenizer,
        {
            "tokenizer_config.json": damage.of_json,
            "generation_config.json": damage.of_json,
            "config.json": damage.of_json,
        },
        _read_chat,
    ),
    "chat template": Reader(_chat, {"chat_template.jinja": damage.of_bytes}, _read_chat),
    "sentencepiece": Reader(
        _sentencepiece, {"tokenizer.model": damage.of_bytes}, _read_sentencepiece
    ),
    "token files": Reader(
        _tokens, {"a.idx": damage.of_numbers, "a.bin": damage.of_bytes}, _read_tokens
    ),
    "parquet": Reader(_parquet, {"a.parquet": damage.of_bytes}, _read_columns),
    "arrow": Reader(
        _arrow, {"a.arrow": damage.of_bytes, "b.arrow": damage.of_bytes}, _read_columns
    ),
    "memory": Reader(_memories, {"alice.safetensors": _of_memory, "bob.safetensors": _of_memory},
                     _read_memories),
    "run configuration": Reader(_run, {"config.json": damage.of_json}, _read_run),
    "report": Reader(
        _run,
        {
            "results/recall.json": damage.of_json,
            "results.json": damage.of_json,
            "environment.json": damage.of_json,
            "metrics.jsonl": damage.of_lines,
            "config.json": damage.of_json,
        },
        _read_report,
    ),
}  # fmt: skip
