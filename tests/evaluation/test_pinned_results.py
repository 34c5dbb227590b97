"""Every evaluation's record, arrays and views, at a tiny size, beside those stored.

Readers of `RUN/results` rely on keys, their order and the meaning of numbers. After a deliberate
change, `python -m tests.evaluation.test_pinned_results` stores what the evaluations give now.
"""

import dataclasses
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.data import RecallData, TextData
from fwpkm_jax.evaluation import EVALS, Subject
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers.lact import LaCTConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.rules import FwMLP
from tests.evaluation.conftest import tiny_model_config

STORED = Path(__file__).parent / "pinned_results.json"
RECALL = RecallData(
    length=24, num_facts=2, num_keys=4, num_values=4, num_filler=4, min_distance=8, num_valid=8
)
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "recall": {"vocab_size": RECALL.vocab_size},
    "fwmlp": {
        "fast_weight": FastWeightConfig(
            rule=FwMLP(key_dim=8, value_dim=8, hidden_dim=6), chunk_size=8
        )
    },
    "lact": {
        "mixers": ("swa", "lact"),
        "memory_layers": (),
        "lact": LaCTConfig(
            num_heads=2, num_fast_heads=2, hidden_dim=4, chunk_size=5, window=5, low_rank=2
        ),
    },
}
NEEDLE = {"haystack_words": (10,), "samples": 2, "readings": (1, 2), "piece_length": 8}
LONGBENCH = {"data": "FOLDER", "tasks": ("musique",), "max_tokens": 400, "piece_length": 8}
PARITY = {
    "protocol": "release",
    "memory_reset": "document",
    "chunk_size": 6,
    "write": "on",
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppl": ("ppl", "tiny", {"segment_length": 18, "max_tokens": 60}),
    "ppl, as the release": ("ppl", "tiny", {"segment_length": 18, **PARITY}),
    "ppl, bfloat16": (
        "ppl",
        "fwmlp",
        {"max_documents": 1, "write": "on"},
    ),
    "needle": ("needle", "tiny", NEEDLE),
    "needle, as the release": (
        "needle",
        "tiny",
        NEEDLE
        | {"mode": "reference", "chunk_size": "model"}
        | {"reset_memory_between_samples": True, "yarn_factor": 4.0, "depths": (10.0, 90.0)},
    ),
    "needle, frozen": ("needle", "tiny", NEEDLE | {"write": False, "readings": (1,)}),
    "needle, LaCT": ("needle", "lact", NEEDLE | {"readings": (1,)}),
    "trace": ("trace", "tiny", {"haystack_words": 10, "samples": 2, "readings": 2}),
    "longbench": ("longbench", "tiny", LONGBENCH),
    "longbench, chunks": (
        "longbench",
        "fwmlp",
        LONGBENCH | {"yarn_factor": None, "memory_reset": "sample"},
    ),
    "gate_map": ("gate_map", "tiny", {"tokens": 42, "chunk_size": 8}),
    "gate_map, frozen": ("gate_map", "tiny", {"tokens": 42, "document": 1, "write": False}),
    "gates": ("gates", "tiny", {"batch_size": 2, "max_batches": 2}),
    "continual": (
        "continual",
        "tiny",
        {"domains": ("FOLDER/one", "FOLDER/two"), "batch_size": 2, "max_batches": 2},
    ),
    "recall": ("recall", "recall", {"batch_size": 2, "batches": 2, "num_bins": 2}),
    "recall, a memory for each batch": ("recall", "recall", {"num_bins": 2}),
}

ROUNDED = ("ppl, as the release", "ppl, bfloat16", "needle, as the release", "longbench")
"""Cases whose memory is rounded between calls."""


def texts(folder: Path) -> TextData:
    """Two texts in a folder that also holds two domains and one task of LongBench."""
    for letter, words in (("a", 60), ("b", 20)):
        (folder / f"{letter}.txt").write_text(" ".join(f"{letter}{i % 7}" for i in range(words)))
    question = {"context": "three " * 7, "input": "Who?", "answers": ["cd"], "length": 3}
    lines = (json.dumps(question | {"language": "en", "_id": i}) for i in "xy")
    (folder / "musique.jsonl").write_text("\n".join(lines))
    for domain in ("one", "two"):
        (folder / domain).mkdir()
        for part in ("train", "valid"):
            (folder / domain / f"{part}.txt").write_text(f"{part} {domain} " * 12)
    paths = tuple(str(folder / f"{letter}.txt") for letter in "ab")
    return TextData(train_paths=paths, valid_paths=paths, length=15)


def evaluated(case: str, folder: Path) -> dict[str, Any]:
    """A case's record, a summary of its arrays, its views; times and versions are left out."""
    name, kind, options = CASES[case]
    config = dataclasses.replace(tiny_model_config(), **MODELS[kind])

    @nnx.jit
    def init() -> Any:
        model = LanguageModel(config, rngs=nnx.Rngs(0))
        return model, model.init_memory(jax.random.key(1), groups=1)

    model, memory = init()
    data = texts(folder)
    subject = Subject(
        model=model,
        memory=memory,
        data=RECALL if kind == "recall" else data,
        lifetime="batch" if "each batch" in case else "carried",
        groups=1,
        batch_size=2,
        seed=3,
        fast_weight_dtype="bfloat16" if case in ROUNDED else "float32",
    )
    given = json.loads(json.dumps(options).replace("FOLDER", str(folder)))
    given = {key: tuple(x) if isinstance(x, list) else x for key, x in given.items()}
    evaluation = EVALS[name]
    result = evaluation.run(subject, evaluation.config(**given))
    found = {
        "record": result.record,
        "arrays": {
            key: {
                "dtype": str(x.dtype),
                "shape": list(x.shape),
                "sum": float(np.sum(x, dtype=np.float64)),
            }
            for key, x in result.arrays.items()
        },
        "table": evaluation.table(result.record),
        "finding": evaluation.finding(result.record),
        "files": [path.name for path in evaluation.plot(result.record, folder / "out")],
    }
    return json.loads(json.dumps(found).replace(str(folder), "FOLDER"))


VARYING = {"seconds", "jax", "device"}


def compare(stored: Any, found: Any, place: str = "") -> None:
    """Same keys in the same order, same types; numbers to rounding; texts but for their numbers."""
    assert type(found) is type(stored), place
    key = place.rpartition("/")[2]
    if isinstance(stored, dict):
        assert list(found) == list(stored), place
        for name in stored:
            compare(stored[name], found[name], f"{place}/{name}")
    elif isinstance(stored, list):
        assert len(found) == len(stored), place
        for index, (one, other) in enumerate(zip(stored, found, strict=True)):
            compare(one, other, f"{place}/{index}")
    elif isinstance(stored, float) and key not in VARYING:
        np.testing.assert_allclose(found, stored, rtol=1e-4, atol=2e-4, err_msg=place)
    elif place in ("/table", "/finding"):
        assert _without_numbers(found) == _without_numbers(stored), place
    elif key not in VARYING:
        assert found == stored, place


def _without_numbers(text: Any) -> str:
    """The text with every number as #; columns may be wider by a sign."""
    return re.sub(r"[-\s]+", " ", re.sub(r"[-+]?\d[\d,.]*", "#", text))


@pytest.mark.thorough("ppl")
@pytest.mark.slow_cases(
    "ppl, bfloat16",
    "needle, as the release",
    "needle, LaCT",
    "needle, frozen",
    "longbench, chunks",
    "gate_map, frozen",
    "ppl, as the release",
    "gates",
    "trace",
    "gate_map",
    "continual",
)
@pytest.mark.parametrize("case", CASES)
def test_a_result_is_what_it_was(case, tmp_path):
    stored = json.loads(STORED.read_text())
    assert set(stored) == set(CASES)
    compare(stored[case], evaluated(case, tmp_path))


if __name__ == "__main__":
    pinned = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            pinned[case] = evaluated(case, Path(folder))
        print(f"{case}: {len(json.dumps(pinned[case])):,} characters", flush=True)
    lines = ",\n".join(
        f"{json.dumps(case)}: {json.dumps(one, ensure_ascii=False)}" for case, one in pinned.items()
    )
    temporary = STORED.with_suffix(".part")
    temporary.write_text(f"{{\n{lines}\n}}\n")
    os.replace(temporary, STORED)
