"""The product-key memory against this folder's arrays, which come with the repository."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.chunks import map_groups, merge_groups, split_groups
from fwpkm_jax.core.streams import streaming
from fwpkm_jax.core.streams.flush import flush
from fwpkm_jax.core.streams.pending import Signals, init_pending
from fwpkm_jax.rules.fwpkm import FwPKM, FwPKMMemory
from tests.golden import vectors
from tests.golden.own import make, oracle

PATHS = sorted(Path(__file__).parent.glob("*.npz"))


@pytest.fixture
def file(path, dtype):
    return vectors.open_file(path, dtype)


def test_every_case_has_its_file():
    assert [path.stem for path in PATHS] == sorted(make.CASES)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_arrays_are_what_the_script_makes(path):
    config, arrays = vectors.load(path)
    settings, shape = make.CASES[path.stem]
    assert config == dataclasses.asdict(settings) | {"seed": config["seed"]}
    inputs = oracle.sample(settings, seed=config["seed"], **shape)
    expected, _ = make.results(inputs, settings)
    for name, x in inputs._asdict().items():
        np.testing.assert_array_equal(arrays.pop(f"in_{name}"), x)
    assert set(arrays) == set(expected)
    for name, x in expected.items():
        np.testing.assert_allclose(arrays[name], x, rtol=1e-10, atol=1e-12)


@pytest.mark.slow_cases(
    "float32-idw",
    "float32-idw_heads_masked_shared",
    "float32-dot_heads_masked_groups",
    "float64-idw",
)
@pytest.mark.by_default("float64-dot_heads_masked_groups")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_pass_and_stream_match_the_arrays(file):
    file.assert_matches(jax.jit(lambda arrays: _results(file.config, arrays))(file.arrays))


def _results(config, arrays):
    rule = FwPKM(
        key_dim=arrays["in_query"].shape[-1],
        value_dim=arrays["in_value"].shape[-1],
        **{
            name: config[name]
            for name in ("num_subkeys", "num_heads", "top_k", "lookahead", "score")
        },
    )
    groups, chunk_size = config["groups"], config["chunk_size"]
    memory = FwPKMMemory(arrays["in_keys"], arrays["in_values"])
    memory = jax.tree.map(lambda x: jnp.broadcast_to(x, (groups, *x.shape)), memory)
    signals = Signals(*(arrays[f"in_{name}"] for name in ("query", "value", "gate", "mask")))
    query, value, gate, mask = signals
    sequence = rule.sequence(query, value, gate=gate, mask=mask, chunk_size=chunk_size)
    grouped = jax.tree.map(lambda x: split_groups(x, groups), (sequence, signals))

    def run(memory, sequence):
        return tuple(rule.run(memory, sequence, chunk_size=chunk_size))

    def stream(memory, signals):
        pending = init_pending(signals, chunk_size + rule.lookahead)
        after, pending, output, _ = streaming.push(
            rule, memory, pending, signals, chunk_size=chunk_size
        )
        flushed, _ = flush(rule, after, pending)
        return output, after, flushed

    after, output, access, info = map_groups(run, memory, grouped[0])
    stream_output, streamed, flushed = stream(memory, grouped[1])
    return {
        "output": merge_groups(output),
        "slot_ids": merge_groups(access.slot_ids),
        "slot_weights": merge_groups(access.slot_weights),
        "addressing_loss": info.addressing_loss,
        "keys": after.keys,
        "values": after.values,
        "stream_output": merge_groups(stream_output),
        "stream_keys": streamed.keys,
        "stream_values": streamed.values,
        "stream_flushed_keys": flushed.keys,
        "stream_flushed_values": flushed.values,
    }
