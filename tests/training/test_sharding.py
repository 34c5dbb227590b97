"""The same training on any mesh: losses, layouts, and communication between devices."""

import dataclasses
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from fwpkm_jax.layers.norms import RMSNorm
from fwpkm_jax.layers.parameters import declare, parameter
from fwpkm_jax.layers.partition import MeshConfig, Partition
from fwpkm_jax.models.sharding import parameter_shardings, parameter_spec
from fwpkm_jax.paper.models import TABLE_1, paper_model
from fwpkm_jax.rules import FwMLP
from fwpkm_jax.run.train import train
from fwpkm_jax.training.sharding import check_mesh, make_partition
from fwpkm_jax.training.state import MemoryConfig, init_state, named_leaves
from tests.training.tiny_config import get_config

SLOTS, CHUNKS = 144, 2
FACTORS = ("q_proj/lora_a", "q_proj/lora_b", "o_proj/lora_a", "o_proj/lora_b")
SLOW = {
    "one": ("one_columns",),
    "turns": ("turns_two",),
    "whole": ("whole_data", "whole_fsdp", "whole_tensor"),
    "split": ("split_columns", "split_slots"),
    "shared": ("shared_columns", "shared_slots"),
    "batch": ("batch_columns", "batch_independent"),
    "family": ("family_data", "family_tensor"),
    "documents": ("documents_tensor",),
    "imported": ("imported_fsdp", "imported_tensor"),
    "delta": ("delta_columns",),
    "parts": ("parts_eight", "parts_data", "parts_tensor"),
}


def run_apart(out, names):
    """Runs of `mesh_runs`, in one process with eight simulated devices."""
    command = [sys.executable, "-m", "tests.training.mesh_runs", str(out), *names]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(Path(out).read_text())


def made_once(tmp_path_factory, file, names):
    """Runs that all workers of a test run share."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    out = folder / file
    with out.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if out.exists():
            return json.loads(out.read_text())
        return run_apart(out, names)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One device, and eight that split the memory by columns."""
    return made_once(tmp_path_factory, "mesh_runs.json", ("one", "columns"))


@pytest.fixture(scope="module")
def all_runs(runs, tmp_path_factory):
    """These, the other ways to share a memory, and checkpoints that change the mesh."""
    others = ("independent", "slots", "restore")
    return runs | made_once(tmp_path_factory, "other_mesh_runs.json", others)


def assert_same_training(actual, expected):
    """Equal but for the order of sums: 1e-4 of each metric, 1e-3 of each array's norm."""
    for mine, theirs in zip(actual["losses"], expected["losses"], strict=True):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-4, atol=1e-6, err_msg=name)
    for name, norm in expected["sizes"].items():
        # A bias in front of a batch norm changes nothing: its steps are rounding.
        least = 2e-5 if name.endswith("feed_forward/query_proj/bias") else 0
        np.testing.assert_allclose(actual["sizes"][name], norm, rtol=1e-3, atol=least, err_msg=name)


def moved_tables(run, slots):
    """Collectives that give a value table or its gradient, whole or in parts of `slots`."""
    return [
        (kind, dims)
        for kind, _, results in run["sent"]
        for dims in results
        if len(dims) > 1 and set(dims) & set(slots)
    ]


@pytest.mark.slow
def test_eight_devices_train_as_one(runs):
    assert_same_training(runs["columns"], runs["one"])
    assert runs["columns"]["sent"]
    assert moved_tables(runs["columns"], {SLOTS, SLOTS // 2}) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["independent", "slots"])
def test_two_and_four_devices_train_as_one(all_runs, name):
    assert_same_training(all_runs[name], all_runs["one"])
    assert all_runs[name]["sent"]
    assert moved_tables(all_runs[name], {SLOTS, SLOTS // 2}) == []


@pytest.mark.slow
def test_averaged_weights_are_trained_and_kept_on_two_devices_as_on_one(tmp_path_factory):
    names = ("ema", "ema_two", "free", "free_two")
    found = made_once(tmp_path_factory, "averages.json", names)
    for name, average in (("ema", "ema"), ("free", "z")):
        assert_same_training(found[f"{name}_two"], found[name])
        kernel = "blocks/0/mixer/q_proj/kernel"
        kept = {
            path: shape
            for path, shape in found[f"{name}_two"]["parts"].items()
            if path.startswith("optimizer/") and f"/{average}/" in path and path.endswith(kernel)
        }
        assert list(kept.values()) == [[8, 64]], found[f"{name}_two"]["parts"].keys()


@pytest.mark.slow
def test_each_device_holds_its_part_of_the_memory_and_the_weights(all_runs):
    table = "memory/layer_0/values"
    assert all_runs["independent"]["parts"][table] == [1, SLOTS, 8]
    assert all_runs["columns"]["parts"][table] == [2, SLOTS, 8 // 4]
    assert all_runs["slots"]["parts"][table] == [4, SLOTS // 2, 8]
    kernel = "params/blocks/0/mixer/q_proj/kernel"
    assert all_runs["one"]["parts"][kernel] == [16, 64]
    assert all_runs["independent"]["parts"][kernel] == [8, 64]
    assert all_runs["columns"]["parts"][kernel] == [8, 32]
    of_columns = [all_runs["columns"]["parts"][f"params/blocks/0/mixer/{n}"] for n in FACTORS]
    assert of_columns == [[8, 2], [2, 32], [16, 2], [2, 8]]


@pytest.mark.thorough
def test_reads_by_columns_need_nothing_inside_the_chunks_loop(runs):
    in_loop = [(kind, dims) for kind, count, dims in runs["columns"]["sent"] if count > 1]
    # What the chunks' loop over the keys adds up: usage and gradient of the sub-keys.
    assert in_loop
    assert all(kind == "all-reduce" for kind, _ in in_loop)
    assert not [
        dims for _, results in in_loop for dims in results if len(dims) == 2 and dims[0] > 2
    ]


@pytest.mark.thorough
def test_reads_by_slots_take_one_sum_per_chunk_each_way(all_runs):
    tokens = 4 * 2 * 8  # groups, sequences of each, tokens of a chunk
    sums = [count for kind, count, dims in all_runs["slots"]["sent"] if [tokens, 8] in dims]
    assert sum(sums) == 2 * CHUNKS


@pytest.mark.slow
def test_a_checkpoint_is_read_bit_for_bit_over_another_mesh(all_runs):
    assert len(all_runs["restore"]) == 5
    assert all(found == {"equal": True, "laid_out": True} for found in all_runs["restore"].values())


@pytest.mark.slow
def test_padding_and_documents_with_memories_of_their_own_read_as_on_one_device(tmp_path):
    moved = run_apart(tmp_path / "out.json", ["padding"])["padding"]
    assert len(moved) == 12
    assert max(moved.values()) < 1e-6, moved


def test_one_device_is_no_mesh():
    assert make_partition(MeshConfig()) is None
    assert make_partition(MeshConfig(memory="columns")) is None


def replace(experiment, *, mesh, **training):
    return dataclasses.replace(
        experiment, mesh=mesh, training=dataclasses.replace(experiment.training, **training)
    )


def test_a_mesh_of_another_size_than_the_machine_is_refused(tmp_path):
    experiment = replace(get_config(), mesh=MeshConfig(data=2, fsdp=2, memory="columns"))
    experiment = dataclasses.replace(experiment, run_dir=str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"mesh\.data=2 x mesh\.fsdp=2 .* 4 devices.* are 1 \(cpu"):
        train(experiment)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="model=0 is too small; use 1"):
        MeshConfig(model=0)


def test_what_does_not_divide_is_named():
    tiny = get_config()

    def check(experiment):
        check_mesh(
            experiment.mesh,
            model=experiment.model,
            training=experiment.training,
            length=experiment.data.length,
        )

    with pytest.raises(
        ValueError, match=r"batch_size=4 in 2 micro-batches gives 2 .* multiple of 4"
    ):
        check(replace(tiny, mesh=MeshConfig(data=2, fsdp=2), micro_batches=2))
    with pytest.raises(ValueError, match=r"data\.length=16 .* mesh\.model=3"):
        check(replace(tiny, mesh=MeshConfig(model=3)))
    with pytest.raises(ValueError, match=r"memory\.groups=2 .* mesh\.memory=columns .* of 2"):
        check(replace(tiny, mesh=MeshConfig(data=4)))
    with pytest.raises(ValueError, match=r"memory\.groups=2 .*mesh\.data a divisor of 2"):
        check(replace(tiny, mesh=MeshConfig(data=4, memory="slots")))
    with pytest.raises(ValueError, match=r"num_kv_heads=1 does not divide into mesh\.model=2"):
        check(replace(tiny, mesh=MeshConfig(model=2)))
    check(replace(tiny, mesh=MeshConfig(data=2)))


def abstract_partition(data=1, fsdp=1, model=1, memory="independent"):
    names = ("data", "fsdp", "model")
    mesh = AbstractMesh((data, fsdp, model), names, axis_types=(AxisType.Auto,) * 3)
    return Partition(mesh, memory)


def test_a_dense_memory_is_not_shared():
    with pytest.raises(ValueError, match=r"columns.*FwMLP.*mesh\.memory=independent"):
        abstract_partition(fsdp=2, memory="columns").memory_specs(FwMLP(), {})


def test_a_weight_that_does_not_divide_is_named():
    name, partition = "blocks/3/mixer/o_proj/kernel", abstract_partition(fsdp=4, model=8)
    axes = ("heads", "embed")
    assert parameter_spec(partition, axes, (24, 12), name=name) == P(("model",), ("fsdp",))
    with pytest.raises(ValueError, match=r"heads dimension of blocks/3.*, 20, .*mesh\.model=8"):
        parameter_spec(partition, axes, (20, 12), name=name)


class Declared(nnx.Module):
    def __init__(self, **more):
        self.inner = nnx.Dict(weight=parameter(jnp.zeros((2, 8)), "matrix", ("heads", "embed")))
        self.whole = parameter(jnp.zeros((2, 3, 4)), "matrix")
        self.norm = RMSNorm(8, eps=1e-5)
        self.more = nnx.Dict(more)


def test_a_parameter_is_split_as_it_says_where_it_is_made():
    partition = abstract_partition(fsdp=4, model=2)
    specs = {
        name: layout.spec
        for name, layout in named_leaves(
            parameter_shardings(partition, nnx.state(Declared()))
        ).items()
    }
    assert specs == {
        "inner/weight": P(("model",), ("fsdp",)),
        "norm/weight": P(None),
        "whole": P(None, None, None),
    }
    silent = Declared(unheard_of=nnx.Param(jnp.zeros(8)))
    with pytest.raises(ValueError, match=r"more/unheard_of does not say what it is; .*parameter\("):
        parameter_shardings(partition, nnx.state(silent))
    wrong = Declared(wrong=nnx.Param(jnp.zeros(8), **declare("matrix", ("heads", "embed"))))
    with pytest.raises(ValueError, match=r"more/wrong \[8\] .* axes \('heads', 'embed'\);"):
        parameter_shardings(partition, nnx.state(wrong))
    with pytest.raises(ValueError, match=r"a parameter \[8\] is declared with the axes"):
        parameter(jnp.zeros(8), "matrix", ("heads", "embed"))
    with pytest.raises((ValueError, jaxtyping.TypeCheckError), match="'weight'"):
        parameter(jnp.zeros(8), "weight")  # pyright: ignore


@pytest.mark.thorough("gdn_fa__fwmlp2_6_10", "gdn_swa__pkm6_fwpkm2_10")
@pytest.mark.parametrize("name", ["gdn_fa__fwmlp2_6_10", "gdn_swa__pkm6_fwpkm2_10", "lact"])
def test_every_weight_of_the_papers_models_has_its_rule(name):
    assert name in TABLE_1
    model = paper_model(name)
    params = jax.eval_shape(
        lambda: init_state(model, memory=MemoryConfig(), optimizer=None, seed=0)
    ).params
    layouts = named_leaves(parameter_shardings(abstract_partition(4, 16, 4), params))
    shapes = named_leaves(params)
    assert layouts.keys() == shapes.keys()
    # Whole are vectors, sub-keys, and what LaCT makes its first weights of.
    whole = {n for n, layout in layouts.items() if not any(layout.spec)}
    assert sum(shapes[n].size for n in whole) < 0.03 * sum(x.size for x in shapes.values())


@pytest.mark.slow
@pytest.mark.parametrize("base", SLOW)
def test_every_kind_of_layer_trains_alike_on_every_mesh(base, tmp_path):
    results = run_apart(tmp_path / "runs.json", (base, *SLOW[base]))
    for name in SLOW[base]:
        assert_same_training(results[name], results[base])
        moved = moved_tables(results[name], {SLOTS, SLOTS // 4, SLOTS // 8})
        # The gradient of a learned table is summed over the parts of the batch.
        assert [kind for kind, _ in moved if kind != "all-reduce"] == []


@pytest.mark.slow
def test_every_mesh_reads_what_every_mesh_saved(tmp_path):
    found = run_apart(tmp_path / "runs.json", ["restore_all"])["restore_all"]
    assert len(found) == 49 + 1
    assert [n for n, one in found.items() if one != {"equal": True, "laid_out": True}] == []


@pytest.mark.slow
def test_sixteen_million_slots_over_eight_devices_train_as_on_one(tmp_path):
    results = run_apart(tmp_path / "runs.json", ("many", "many_slots"))
    assert results["many_slots"]["parts"]["memory/layer_0/values"] == [1, 4096**2 // 8, 4]
    assert_same_training(results["many_slots"], results["many"])
    assert moved_tables(results["many_slots"], {4096**2, 4096**2 // 8}) == []


@pytest.mark.slow
def test_a_run_over_devices_resumes_bit_exactly_and_equals_one_device(tmp_path):
    records = run_apart(tmp_path / "loop.json", ["loop"])
    for record in (line for lines in records.values() for line in lines):
        record.pop("tokens_per_second")
    assert len(records["unbroken"]) == 4
    assert "valid/loss" in records["unbroken"][-1]
    for stopped, whole in zip(records["resumed"], records["unbroken"], strict=True):
        assert {name: stopped[name] for name in whole} == whole
    for over_many, alone in zip(records["unbroken"], records["one"], strict=True):
        for name, value in alone.items():
            np.testing.assert_allclose(over_many[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
