"""No reader executes code from a file, and no archive is unpacked."""

import ast
import io
import json
import os
import pickle
import shutil
import zipfile
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.paper.loss_difference import read_losses
from fwpkm_jax.config import read_experiment
from fwpkm_jax.data import TokenFile, load_tokenizer
from fwpkm_jax.data.json_lines import START
from fwpkm_jax.data.longbench import read_samples
from fwpkm_jax.data.prepare import Source, text_files
from fwpkm_jax.interchange.weights_folder import read_folder
from fwpkm_jax.paper.data.zarr_array import ZarrArray
from fwpkm_jax.training.checkpoints.restore import DamagedCheckpointError, read_checkpoint
from fwpkm_jax.training.optimizer import make_optimizer
from fwpkm_jax.training.runs.metrics import truncate_metrics
from fwpkm_jax.training.state import init_state

ROOT = Path(__file__).parents[2]


@pytest.fixture
def canary(tmp_path):
    """A pickle that makes a directory when it is loaded; checked in the end that none is there."""
    directory = tmp_path / "called"

    class Command:
        def __reduce__(self):
            return os.mkdir, (str(directory),)

    yield pickle.dumps(Command(), protocol=4)
    assert not directory.exists()


def beside(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def zipped(path: Path, members: dict[str, bytes], **arguments) -> Path:
    with zipfile.ZipFile(path, "w", **arguments) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def object_array(command: bytes) -> bytes:
    """A `.npz` whose arrays are pickles, as NumPy writes arrays of objects."""
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + command
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name in ("loss_writing", "source", "document", "segment", "position"):
            file.writestr(f"{name}.npy", array)
    return content.getvalue()


def records(source: Source) -> list:
    bytes_ = load_tokenizer("bytes")
    return [x for span in source.spans for x in span.part.read(bytes_, START) if x.content]


def losses(path: Path, content: bytes):
    beside(path.with_suffix(".json"), b"{}")
    return read_losses(beside(path.with_suffix(".npz"), content), memory="writing")


READERS = {
    "tokens": lambda at, bad: TokenFile(
        beside(at / "x.bin", bad + b"\0" * (len(bad) % 2))
        if beside(at / "x.idx", f"{-(-len(bad) // 2)} 0\n".encode())
        else at,
        vocab_size=100,
    )[0:10],
    "index": lambda at, bad: TokenFile(
        beside(at / "x.bin", b"") if beside(at / "x.idx", bad) else at, vocab_size=9
    ),
    "text": lambda at, bad: records(text_files(beside(at / "x.txt", bad))),
    "records": lambda at, bad: records(text_files(beside(at / "x.jsonl", bad))),
    "tokenizer": lambda at, bad: load_tokenizer(str(beside(at / "x.model", bad))),
    "LongBench": lambda at, bad: list(
        read_samples(zipped(at / "x.zip", {"data/hotpotqa.jsonl": bad}), "hotpotqa")
    ),
    "Parquet": lambda at, bad: records(text_files(beside(at / "x.parquet", bad))),
    "Zarr": lambda at, bad: ZarrArray.open(beside(at / ".zarray", bad).parent, wanted="it"),
    "config": lambda at, bad: read_experiment(beside(at / "config.json", bad).parent),
    "losses": lambda at, bad: losses(at / "ppl", object_array(bad)),
    "weights": lambda at, bad: read_folder(
        (beside(at / "weights.safetensors", bad), beside(at / "config.json", b"{}"))[0].parent
    ),
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_a_pickle_in_a_files_place_is_refused(fault, canary, tmp_path, reader):
    (tmp_path / "data").mkdir()
    with fault("a pickle in a file's place"), pytest.raises(ValueError, match=r"\S") as error:
        READERS[reader](tmp_path / "data", canary)
    assert str(tmp_path / "data") in str(error.value)


def test_pickles_in_the_metadata_of_columns_and_chunks_are_not_loaded(fault, canary, tmp_path):
    """Arrow once loaded the types of columns from pickles; Zarr's own reader takes filters."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    extension = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": canary,
    }
    field = pyarrow.field("text", pyarrow.string(), metadata=extension)
    table = pyarrow.table({"text": ["a", "b"]}, schema=pyarrow.schema([field]))
    parquet.write_table(table, tmp_path / "x.parquet")
    with fault("a pickle in a file's place"):
        assert [x.content for x in records(text_files(tmp_path / "x.parquet"))] == ["a", "b"]

    pytest.importorskip("tensorstore")
    described = {
        "zarr_format": 2, "shape": [1, 2], "chunks": [1, 2], "dtype": "<u2", "order": "C",
        "compressor": None, "fill_value": 0, "filters": [{"id": "pickle", "protocol": 4}],
    }  # fmt: skip
    beside(tmp_path / "z" / ".zarray", json.dumps(described).encode())
    beside(tmp_path / "z" / "0.0", canary)
    with fault("a pickle in a file's place"), pytest.raises(ValueError, match="cannot be read"):
        ZarrArray.open(tmp_path / "z", wanted="it").read(0, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("abandoned_reads")
def test_pickles_in_a_checkpoint_are_not_loaded(fault, canary, unbroken, tmp_path):
    experiment = unbroken.experiment
    abstract = jax.eval_shape(
        partial(
            init_state, experiment.model, memory=experiment.training.memory,
            optimizer=make_optimizer(experiment.optimizer, steps=20), seed=0,
        )
    )  # fmt: skip
    folder = shutil.copytree(unbroken.directory / "checkpoints" / "20", tmp_path / "c" / "20")
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content = path.read_bytes()
        path.write_bytes(canary)
        with fault("a pickle in a checkpoint's file"):
            try:
                restored = read_checkpoint(folder.parent, 20, abstract)
            except DamagedCheckpointError as error:
                assert str(folder) in str(error)  # noqa: PT017  A file may also be of no account.
            else:
                jax.tree.map(
                    np.testing.assert_array_equal,
                    restored.state.params,
                    unbroken.result.state.params,
                )
        path.write_bytes(content)


def test_a_pickle_in_the_metrics_is_left_out(fault, canary, tmp_path, caplog):
    path = beside(tmp_path / "metrics.jsonl", b'{"step": 1}\n' + canary + b'\n{"step": 2}\n')
    with fault("a pickle in a file's place"):
        truncate_metrics(path, step=2)
        assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
        assert str(path) in caplog.text


@pytest.mark.thorough
def test_no_module_can_load_a_pickle():
    """Files of torch are read by torch alone, which loads no more than weights.

    Exported programs import torch, to compute with it.
    """
    dangerous = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "torch"}
    importers = set()
    for path in [*ROOT.glob("fwpkm_jax/**/*.py"), *ROOT.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {name.split(".")[0] for name in names} & dangerous:
                importers.add(path.name)
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in ast.unparse(node), path
    assert importers == {"torch_file.py", "modeling_fwpkm.py", "modeling_fwpkm_hybrid.py"}


OUTSIDE = ("../escaped", "/tmp/escaped-fwpkm", "a/../../escaped")


def test_nothing_leaves_an_archive(fault, tmp_path):
    """Names that lead outside are read as names; no member becomes a file."""
    folder = tmp_path / "in"
    folder.mkdir()
    record = {"context": "c", "input": "i", "answers": ["a"], "length": 1, "language": "en"}
    task = {"data/hotpotqa.jsonl": json.dumps(record).encode()}
    zipped(folder / "x.zip", {**dict.fromkeys(OUTSIDE, b"out"), **task})
    before = sorted(tmp_path.rglob("*"))
    with fault("an archive whose names lead outside", len(OUTSIDE)):
        assert len(list(read_samples(folder / "x.zip", "hotpotqa"))) == 1
        assert sorted(tmp_path.rglob("*")) == before
        assert not Path("/tmp/escaped-fwpkm").exists()


def test_an_archive_that_would_grow_without_bound_is_refused(fault, tmp_path, monkeypatch):
    monkeypatch.setattr("fwpkm_jax.data.longbench._MOST_BYTES", 1000)
    bomb = zipped(
        tmp_path / "x.zip", {"data/hotpotqa.jsonl": b" " * 1001}, compression=zipfile.ZIP_DEFLATED
    )
    with fault("an archive that grows"), pytest.raises(ValueError, match="1,001 bytes, more than"):
        list(read_samples(bomb, "hotpotqa"))
