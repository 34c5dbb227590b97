"""Compares evaluations whose texts lie over simulated devices with the same on one device.

    python -m tests.evaluation.part_runs OUT.json CASE [CASE ...]

A case is NAME/MODEL/MESH, as `stream/tiny/1x4x1`; MESH has the sizes of `data`, `sequence` and
`model`. NAME may be that of an evaluation, which then reads small files. The number of devices is
fixed before JAX starts. Writes the largest differences relative to the largest number.
"""

import os
import sys

from tests.training import mesh_flags

os.environ.update(mesh_flags.environment(8))

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.data import RecallData, TextData
from fwpkm_jax.evaluation import EVALS, Subject, recall
from fwpkm_jax.evaluation.readers.devices import memory_on_devices, model_on_devices
from fwpkm_jax.evaluation.readers.document_reader import read_document
from fwpkm_jax.evaluation.readers.stream_reader import StreamReader
from fwpkm_jax.evaluation.readers.whole_pass import frozen_row_losses, write_rows
from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayerConfig
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers.attention import AttentionConfig
from fwpkm_jax.layers.mixers.gated_delta_net import GatedDeltaNetConfig
from fwpkm_jax.layers.mixers.lact import LaCTConfig
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMemoryConfig
from fwpkm_jax.layers.partition import MeshConfig, Partition
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.models.outputs import StreamDocument
from fwpkm_jax.rules import FwMLP
from fwpkm_jax.training.sharding import make_partition
from tests.evaluation.conftest import tiny_model_config

LENGTH = 75  # Of the text: four segments of 18 and one of 2.


def stream_results(model: Any, memory: Any, partition: Partition | None, write: bool) -> Any:
    """What a document and the start of a second one give, and the memory after them."""
    reader = StreamReader(
        model, memory, write=write, piece_length=18, chunk_size=5, partition=partition
    )
    tokens = np.random.default_rng(0).integers(0, 257, LENGTH)
    readings = [
        one.fetch()
        for text in (tokens, tokens[:12])
        for one in read_document(reader, text, segment_length=18)
    ]
    return readings, reader.stream.memory


def needle_results(model: Any, memory: Any, partition: Partition | None, write: bool) -> Any:
    """A text read twice, with one write each, then a question, two answers and their losses."""
    reader = StreamReader(
        model,
        memory,
        chunk_size="flush",
        capacity=64,
        max_length=64,
        piece_length=16,
        vocab_size=257,
        write=write,
        partition=partition,
    )
    tokens = np.random.default_rng(1).integers(0, 257, 41)
    found = []
    for _ in range(2):
        reader.restart()
        reader.read(tokens)
        reader.write()
    reader.read(tokens[:7])
    for _ in range(2):
        found.append((reader.next_token(), reader.last_read()))
        reader.read(np.asarray([reader.next_token()]))
    losses = reader.read(tokens[:9], tokens[1:10]).losses()
    return found, losses, reader.stream.memory


def row_results(model: Any, memory: Any, partition: Partition | None, write: bool) -> Any:
    """The memory after two batches of rows that are no whole chunks, and frozen losses."""
    model = model_on_devices(partition, model)
    memory = memory_on_devices(partition, jax.tree.map(jnp.copy, memory))
    graphdef, params = nnx.split(model)
    memory = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), memory)
    tokens = np.random.default_rng(2).integers(0, 257, (2, 4, 28))
    found = []
    for batch in tokens if write else ():
        memory, gates = write_rows(
            *(graphdef, params, memory, batch), fast_weight_dtype="float32", partition=partition
        )
        found.append(gates)
    losses = frozen_row_losses(graphdef, params, memory, tokens[0], partition=partition)
    options = {"write": write, "partition": partition}
    answers, finite, after = recall._answer(graphdef, params, memory, tokens[1], **options)
    return found, losses, answers, finite, after


def piece_results(model: Any, memory: Any, partition: Partition | None, write: bool) -> Any:
    """Two pieces of four streams with documents, of which the second has padding anywhere."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 257, (2, 4, 16))
    ids = 1 + np.cumsum(rng.uniform(size=(4, 32)) < 0.15, axis=1)
    memory = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), memory)
    stream = model.init_stream(memory, batch=4, max_length=20, max_chunk_size=5)
    stream = stream._replace(document=StreamDocument(*jnp.zeros((2, 4), jnp.int32)))
    graphdef, params = nnx.split(model)

    @jax.jit
    def read(params, stream, tokens, mask, ids):
        model = nnx.merge(graphdef, params)
        options = {"chunk_size": 5, "write": write, "partition": partition}
        return model.stream(tokens, stream, mask=mask, segment_ids=ids, **options)

    mask = rng.uniform(size=(2, 4, 16)) < [[[1.0]], [[0.6]]]
    first = read(params, stream, tokens[0], mask[0], ids[:, :16])
    second = read(params, first.stream, tokens[1], mask[1], ids[:, 16:])
    return first.logits, second.logits * mask[1][:, :, None], second.stream.memory


def evaluation_results(name: str, model: Any, memory: Any, partition: Partition | None) -> Any:
    """The numbers and texts of an evaluation's record, and its arrays."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for letter, words in (("a", 60), ("b", 20)):
            paths.append(f"{folder}/{letter}.txt")
            Path(paths[-1]).write_text(" ".join(f"{letter}{i % 7}" for i in range(words)))
        question = {"context": "three " * 7, "input": "Who?", "answers": ["cd"], "length": 3}
        lines = (json.dumps(question | {"language": "en", "_id": i}) for i in "xy")
        Path(folder, "musique.jsonl").write_text("\n".join(lines))
        for domain in ("one", "two"):
            Path(folder, domain).mkdir()
            for part in ("train", "valid"):
                Path(folder, domain, f"{part}.txt").write_text(f"{part} {domain} " * 12)
        data: Any = TextData(train_paths=tuple(paths), valid_paths=tuple(paths), length=15)
        if EVALS[name].data == "questions":
            data = RecallData(
                length=24,
                num_facts=2,
                num_keys=4,
                num_values=4,
                num_filler=4,
                min_distance=8,
                num_valid=8,
            )
        subject = Subject(
            model=model,
            memory=memory,
            data=data,
            lifetime="carried",
            groups=1,
            batch_size=2,
            partition=partition,
        )
        options = json.loads(json.dumps(OPTIONS[name]).replace("FOLDER", folder))
        options = {key: tuple(x) if isinstance(x, list) else x for key, x in options.items()}
        result = EVALS[name].run(subject, EVALS[name].config(**options))

    def number(path: Any, x: Any) -> Any:
        if path[-1] == jax.tree_util.DictKey("seconds"):  # Time that passed.
            return None
        return list(x.encode()) if isinstance(x, str) else np.asarray(x, np.float64)

    return jax.tree_util.tree_map_with_path(number, result.record["results"]), result.arrays


_NEEDLE = {"haystack_words": (10,), "samples": 2, "readings": (2,), "piece_length": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "ppl": {"segment_length": 18, "max_tokens": 60},
    "needle": _NEEDLE,
    "trace": {"haystack_words": 10, "samples": 2, "readings": 2},
    "longbench": {
        **{"data": "FOLDER", "tasks": ("musique",), "max_tokens": 400},
        **{"yarn_factor": None, "piece_length": 8},
    },
    "gate_map": {"tokens": 42, "chunk_size": 8},
    "gates": {"batch_size": 2, "max_batches": 2},
    "continual": {"domains": ("FOLDER/one", "FOLDER/two"), "batch_size": 2, "max_batches": 2},
    "recall": {"batch_size": 2, "batches": 2, "num_bins": 2},
}
"""Of evaluations by their names; FOLDER is that of the files."""

RESULTS = {
    "stream": stream_results,
    "haystack": needle_results,
    "rows": row_results,
    "pieces": piece_results,
}


def compare(name: str, kind: str, mesh: str) -> float:
    """The largest difference, in float64."""
    config = dataclasses.replace(tiny_model_config(), **MODELS[kind])

    @nnx.jit
    def init() -> Any:
        model = LanguageModel(config, rngs=nnx.Rngs(0), dtype=None)
        memory = model.init_memory(jax.random.key(1), groups=1)
        return jax.tree.map(as_double, (model, memory))

    model, memory = init()
    data, sequence, heads = map(int, mesh.split("x"))
    sizes = MeshConfig(data=data, sequence=sequence, model=heads)
    partition = make_partition(sizes, jax.devices()[: sizes.num_devices])
    worst = 0.0
    for write in (True, False) if name in RESULTS else (None,):
        expected, found = (
            evaluation_results(name, model, memory, one)
            if write is None
            else RESULTS[name](model, memory, one, write)
            for one in (None, partition)
        )
        for theirs, mine in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            theirs, mine = (np.asarray(x, np.float64) for x in (theirs, mine))
            assert theirs.shape == mine.shape
            size = max(float(np.max(np.abs(theirs), initial=0)), 1e-3)
            apart = float(np.max(np.abs(theirs - mine), initial=0)) / size
            worst = max(worst, apart if np.isfinite(apart) else np.inf)
    return worst


def as_double(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


MODELS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "one_layer": {"mixers": ("swa",), "memory_layers": (0,)},
    "heads": {
        "memory_layers": (),
        "attention": AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8, rotary_fraction=0.5),
        "gdn": GatedDeltaNetConfig(
            num_key_heads=2, num_value_heads=2, key_head_dim=4, value_head_dim=4
        ),
    },
    "wide": {
        "mixers": ("attention", "lact", "mlstm"),
        "lact": LaCTConfig(
            num_heads=2, num_fast_heads=2, hidden_dim=4, chunk_size=5, window=5, low_rank=2
        ),
        "matrix": MatrixMemoryConfig(
            num_key_heads=2, num_value_heads=2, key_head_dim=4, value_head_dim=4
        ),
        "fast_weight": FastWeightConfig(
            rule=FwMLP(key_dim=8, value_dim=8, hidden_dim=6), chunk_size=8
        ),
        "fast_weight_layer": FastWeightLayerConfig(hidden_dim=6, chunk_size=4),
    },
}


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    out, *cases = sys.argv[1:]
    Path(out).write_text(json.dumps({case: compare(*case.split("/")) for case in cases}))
