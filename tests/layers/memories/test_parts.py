"""Memory layers whose sequences lie over several devices: the same results, and what is sent."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from fwpkm_jax.layers.memories.fast_weight import FastWeight, FastWeightConfig
from fwpkm_jax.layers.partition import MemoryLayout, Partition
from fwpkm_jax.rules import FwPKM

CHUNK, MODEL = 8, 8


def run_apart(out, *cases):
    """Cases of `part_runs`, in one process with eight simulated devices."""
    command = [sys.executable, "-m", "tests.layers.memories.part_runs", str(out), *cases]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def assert_equal(results):
    for case, differences in results.items():
        # Output, memory, record, gradients of the parameters, of the tokens and of the memory.
        least = 10 if case.startswith("head") or case.endswith("stream") else 20
        assert len(differences) > least, case
        assert max(differences.values()) < 1e-12, (case, differences)


@pytest.mark.slow
def test_parts_of_sequences_write_one_memory(tmp_path):
    assert_equal(run_apart(tmp_path / "out.json", "fwpkm/4/independent"))


@pytest.mark.slow
def test_a_stream_that_devices_read_in_parts_writes_the_same_memory(tmp_path):
    assert_equal(run_apart(tmp_path / "out.json", "fwmlp/2/stream"))


@pytest.mark.slow
@pytest.mark.slow_cases("documents", "stream", "split")
@pytest.mark.parametrize(
    "cases",
    [
        ("fwpkm/2/independent", "ahead/mesh/columns", "fwpkm/mesh/slots"),
        ("fwpkm/2/stream", "fwmlp_each/2/stream"),
        ("sdm/2/columns", "sdm/mesh/independent", "sdm_each/4/independent"),
        ("fwmlp/2/independent", "clipped/8/independent", "head/4/documents"),
        ("fwmlp_each/8/independent", "fwpkm_each/mesh/independent"),
        pytest.param(
            (
                *("ahead/8/columns", "ahead/4/stream", "fwmlp/4/independent"),
                "fwmlp_each/2/independent",
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["split", "stream", "sdm", "in_turn", "documents", "other_sizes"],
)
def test_every_kind_of_memory_takes_parts(tmp_path, cases):
    assert_equal(run_apart(tmp_path / "out.json", *cases))


@pytest.mark.slow
def test_a_memory_that_goes_from_device_to_device_sends_no_tokens(tmp_path):
    """A split table exchanges tokens; the difference between two lengths says what for each."""
    cases = ("fwmlp/4/sent", "fwmlp_each/4/sent", "fwpkm/4/sent", "head/8/sent")
    results = run_apart(tmp_path / "out.json", *cases)
    for name in ("fwmlp", "fwmlp_each"):
        short, long = results[f"{name}/4/sent"].values()
        assert short == long
        assert 0 < short["forward"] < short["with_gradient"]
    short, long = results["head/8/sent"].values()
    assert short == long
    # A sequence's sums of steps twice, as they fade, and a token that waits for its label. Of two
    # sequences 8 devices send n + m - 2 = 8.
    stream = 2 * (2 * MODEL * 6 + 6 + 3 * MODEL) + MODEL + 2
    assert short["forward"] == 8 * 4 * stream
    split = results["fwpkm/4/sent"].values()
    forward, both = ([sent[name] for sent in split] for name in ("forward", "with_gradient"))
    # All but the lookahead's edge doubles with the length.
    assert forward[1] - 2 * forward[0] == pytest.approx(0, abs=200)
    assert both[1] - 2 * both[0] == pytest.approx(0, abs=1000)


@pytest.mark.slow
def test_parts_that_are_not_whole_chunks_and_split_memories_of_documents_are_named():
    mesh = AbstractMesh(
        (1, 1, 1, 4), ("data", "fsdp", "model", "sequence"), axis_types=(AxisType.Auto,) * 4
    )
    rule = FwPKM(num_subkeys=4, key_dim=4, value_dim=8, num_heads=1, top_k=2)
    x = jnp.zeros((1, 32, MODEL))

    def called(x, layout: MemoryLayout = "independent", **options):
        layer = FastWeight(FastWeightConfig(rule=rule, **options), MODEL, rngs=nnx.Rngs(0))
        memory = layer.init_memory(jax.random.key(0))
        starts = jnp.zeros(x.shape[:2], bool)
        return layer(x, memory, starts=starts, partition=Partition(mesh, memory=layout))

    with pytest.raises(ValueError, match=r"parts of 24 tokens must be whole chunks"):
        called(x[:, :24], chunk_size=CHUNK)
    with pytest.raises(ValueError, match=r"chunk_size=2 does not divide into mesh\.sequence=4"):
        called(x, chunk_size=2)
    with pytest.raises(ValueError, match=r"mesh\.memory='columns' with documents='document'"):
        called(x, "columns", chunk_size=CHUNK, documents="document")
