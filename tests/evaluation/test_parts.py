"""Evaluations over several devices that each read a part of every text: the same results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh, AxisType

from fwpkm_jax.data import TextData
from fwpkm_jax.evaluation import EVALS, Subject
from fwpkm_jax.evaluation.suite import choose_suite
from fwpkm_jax.layers.partition import Partition

CASES = (
    "haystack/tiny/1x4x1",
    "stream/tiny/1x4x1",
    "rows/tiny/1x2x1",
    "rows/tiny/2x2x1",
    "pieces/tiny/2x2x1",
    "pieces/wide/1x2x1",
    "pieces/heads/1x2x2",
)


EVALUATIONS = tuple(name for name in EVALS if name != "lm_eval")
"""The other reads texts side by side, and refuses several devices."""


def run_apart(out, *cases):
    """Cases of `part_runs`, in one process with eight simulated devices."""
    command = [sys.executable, "-m", "tests.evaluation.part_runs", str(out), *cases]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.slow_cases("haystack/tiny/1x4x1", "pieces/heads/1x2x2", "rows/tiny/2x2x1")
@pytest.mark.thorough("haystack/tiny/1x4x1", "rows/tiny/2x2x1", "pieces/heads/1x2x2")
@pytest.mark.parametrize("case", CASES)
def test_texts_in_parts_give_the_same_results(tmp_path, case):
    assert run_apart(tmp_path / "out.json", case)[case] < 1e-12


@pytest.mark.slow
@pytest.mark.slow_cases("needle")
@pytest.mark.parametrize("name", EVALUATIONS)
def test_an_evaluation_over_devices_reports_what_it_reports_on_one(tmp_path, name):
    """To 1e-5: memories are kept in float32 between texts, and a map rounds to four places."""
    case = f"{name}/one_layer/1x2x1"
    assert run_apart(tmp_path / "out.json", case)[case] < 1e-5


def partition(**sizes):
    axes = {"data": 1, "fsdp": 1, "model": 1, **sizes}
    return Partition(AbstractMesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes)))


def test_a_mesh_that_one_stream_cannot_use_is_refused_by_name(model, memory):
    def choose(*names, **sizes):
        subject = Subject(
            model=model,
            memory=memory,
            data=TextData(train_paths=("text.txt",)),
            lifetime="carried",
            groups=1,
            batch_size=1,
            partition=partition(**sizes),
        )
        return choose_suite(names, subject)

    assert choose("ppl", sequence=2, model=2) == ("ppl",)
    assert choose("continual", data=2) == ("continual",)
    with pytest.raises(ValueError, match=r"ppl reads one .* mesh\.data=2 x mesh\.fsdp=1 cannot"):
        choose("ppl", data=2, sequence=2)
    with pytest.raises(ValueError, match=r"needle reads one .* set mesh\.sequence to 2 or more"):
        choose("needle", model=2)


def test_several_devices_are_refused_where_texts_are_read_side_by_side(model, memory):
    data = TextData(train_paths=("none.txt",))
    several = partition(sequence=2)
    subject = Subject(model=model, memory=memory, data=data, partition=several)
    evaluation, config = EVALS["lm_eval"], EVALS["lm_eval"].config()
    with pytest.raises(ValueError, match="lm_eval reads its texts on one device; leave out --mesh"):
        evaluation.evaluate(subject, config)
    assert evaluation.missing(subject, config) == "a single device"
