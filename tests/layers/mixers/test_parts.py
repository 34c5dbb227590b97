"""Sequences that lie over several devices: the same results, and what devices send for them."""

import json
import math
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from fwpkm_jax.layers.mixers import AttentionConfig
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.rules.matrix import MATRIX_RULES
from tests.layers.mixers.own_mixer import RunningSum

MIXERS = ("attention", "window", "gdn", "own", *MATRIX_RULES)
KINDS = ("attention", "window", "gdn", "own", "gla", "ojanet", "mlstm", "omega")
"""A mixer for each way to take parts."""
IN_TURN = ("lact", "titans", "titans_mac", "titans_mag", "titans_mal")
BATCH, KEYS, MODEL = 2, 2 * 4, 8  # Of `part_runs`: sequences, a token's keys, width.


def run_apart(out, *cases):
    """Cases of `part_runs`, in one process with eight simulated devices."""
    command = [sys.executable, "-m", "tests.layers.mixers.part_runs", str(out), *cases]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def assert_equal(results):
    for case, differences in results.items():
        # Output, cache, gradients of the parameters, of the tokens and of the cache.
        assert len(differences) > 4 or case.endswith("whole"), case
        for name, difference in differences.items():
            assert difference < 1e-11, f"{case} {name}: {difference}"


def assert_sent(results):
    """Bytes by the formulas of docs/howto/devices.md."""
    for case, by_length in results.items():
        name, devices = case.split("/")[0], int(case.split("/")[1])
        short, long = by_length["32"], by_length["64"]
        if name != "attention":
            assert short == long, case
            assert 0 < short["forward"] < short["with_gradient"], case
            if name == "gdn":  # Of 2 heads with keys of 4 and values of 3, and a width of 4.
                transitions = (1 + math.ceil(math.log2(devices - 1))) * 2 * (4 * 4 + 4 * 3)
                edge = 3 * 2 * (4 + 4 + 3)
                assert short["forward"] == BATCH * 4 * (transitions + edge)
            elif name == "window":  # Of 5 tokens.
                assert short["forward"] == BATCH * 4 * 5 * (2 * KEYS + 2)
            continue
        for length, sent in ((32, short), (64, long)):
            tokens = BATCH * length // devices
            keys, positions = tokens * 2 * KEYS * 4, tokens * 4
            forward = (devices - 1) * (keys + positions)
            assert sent == {"forward": forward, "with_gradient": 2 * forward + devices * keys}


@pytest.mark.slow
def test_parts_of_sequences_give_the_same_as_whole_ones(tmp_path):
    cases = ("attention/4/padded", "window/4/padded", "gdn/4", "own/2", "gdn/4/sent")
    results = run_apart(tmp_path / "out.json", *cases)
    assert_sent({case: results.pop(case) for case in ("gdn/4/sent",)})
    assert_equal(results)


@pytest.mark.thorough
def test_every_kind_of_mixer_takes_parts(tmp_path):
    assert_equal(run_apart(tmp_path / "out.json", *(f"{name}/8" for name in KINDS)))


@pytest.mark.slow
def test_padding_anywhere_in_the_parts_has_no_effect(tmp_path):
    kinds = ("gdn", "gla", "ojanet", "mlstm", "omega", "mesa", "deltaproduct")
    cases = [f"{name}/4/padded" for name in kinds]
    assert_equal(run_apart(tmp_path / "out.json", *cases))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_every_mixer_takes_parts(tmp_path, devices):
    kinds = ("documents", "whole") if devices == 4 else ("documents",)
    cases = [f"{name}/{devices}/{kind}" for name in MIXERS for kind in kinds]
    assert_equal(run_apart(tmp_path / "out.json", *cases))


@pytest.mark.slow
def test_memories_that_go_from_device_to_device_pass_over_padding(tmp_path):
    cases = [f"{name}/2/padded" for name in IN_TURN]
    assert_equal(run_apart(tmp_path / "out.json", *cases))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_memories_that_go_from_device_to_device_give_the_same(tmp_path, devices):
    cases = [f"{name}/{devices}" for name in IN_TURN]
    kinds = ("documents", "whole")
    cases += [f"{name}_persistent/{devices}/{kind}" for name in IN_TURN[1:] for kind in kinds]
    assert_equal(run_apart(tmp_path / "out.json", *cases))


@pytest.mark.slow
def test_only_attention_sends_more_for_longer_sequences(tmp_path):
    cases = [f"{name}/8/sent" for name in KINDS]
    assert_sent(run_apart(tmp_path / "out.json", *cases))


@pytest.mark.slow
def test_memories_that_go_from_device_to_device_send_as_many_caches_for_any_length(tmp_path):
    results = run_apart(tmp_path / "out.json", *(f"{name}/8/sent" for name in IN_TURN))
    assert_sent(results)
    rounds = 8 + math.gcd(BATCH, 8) - 2
    # Weights, momentum and the start of a map [8, 8] with its scale; two tokens that wait; counts.
    memory = rounds * 4 * (3 * (MODEL * MODEL + MODEL) + 2 * MODEL + 2)
    segment = rounds * 4 * 4 * 6 * KEYS  # Its keys and values, and those of what it looked up.
    window = BATCH * 4 * 5 * (2 * KEYS + 2)  # Beside the memory, as of `window` alone.
    beside = {"titans": 0, "titans_mac": segment, "titans_mag": window, "titans_mal": window}
    for name, more in beside.items():
        assert results[f"{name}/8/sent"]["32"]["forward"] == memory + more, name


class Whole(RunningSum):
    """A mixer whose streams differ from whole sequences, so that it declines parts."""

    context_parallel = False


def partition_of(**sizes):
    mesh = AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    return Partition(mesh)


def test_a_mixer_without_parts_and_a_length_that_does_not_divide_are_named():
    partition = partition_of(data=1, fsdp=1, model=1, sequence=4)
    config = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8)
    attention = config.build(MODEL, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"mesh\.sequence=4: Whole takes no shards of sequences"):
        Whole()(jnp.zeros((1, 8, MODEL)), partition=partition)
    with pytest.raises(ValueError, match=r"length of a sequence=6 .* mesh\.sequence=4"):
        attention(jnp.zeros((1, 6, MODEL)), partition=partition)
