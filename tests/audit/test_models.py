"""Whole models: ten that are only unusual pass every line, planted faults of layers fail one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.audit.model_paths import model_lines
from fwpkm_jax.data import RecallData
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.rules import FwPKM
from tests.audit.conftest import make_subject

RULE = FwPKM(num_subkeys=4, key_dim=8, value_dim=8, top_k=2)
DATA = RecallData(length=32, num_facts=2, num_keys=6, num_values=6, num_filler=12, min_distance=12)


def memory(**changes):
    """A memory layer with another configuration."""
    return {"fast_weight": FastWeightConfig(**{"rule": RULE, "chunk_size": 8} | changes)}


SOUND = {
    "a window and a memory": {},
    "full attention": {"mixers": ("fa",)},
    "no memory": {"memory_layers": ()},
    "a recurrence without attention": {"mixers": ("gdn",)},
    "a mixer that is a memory": {"mixers": ("titans",), "memory_layers": ()},
    "a product-key memory alone": {"memory_layers": (), "pkm_layers": (0,)},
    "a head that is not the embedding": {"tie_embeddings": False},
    "activations in bfloat16": {"activation_dtype": "bfloat16"},
    "chunks of one token": memory(chunk_size=1, rule=replace(RULE, lookahead=0)),
    "a lookahead of three tokens": memory(rule=replace(RULE, lookahead=3)),
    "a memory for each document": memory(documents="document"),
    "experts": {"expert_layers": (0,)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_model_passes_every_line(name):
    subject = replace(make_subject(**SOUND[name]), data=DATA)
    lines = list(model_lines(subject))
    assert {line.name: line.text for line in lines if line.verdict == "fail"} == {}
    skipped = {line.name for line in lines if line.verdict == "skipped"}
    assert skipped <= {"several devices", "users over one base", "restored memory"}, skipped


def mixer(change):
    """A model whose mixer reads inputs and options that `change(x, options)` gives."""
    return lambda subject: planted(subject.model.blocks[0], "mixer", change)


def planted(block, layer, change):
    kind = type(getattr(block, layer))

    def call(self, x, *args, **options):
        x, options = change(x, options)
        return kind.__call__(self, x, *args, **options)

    getattr(block, layer).__class__ = type(f"Planted{kind.__name__}", (kind,), {"__call__": call})


def late(x, start):
    return jnp.where(jnp.arange(x.shape[1])[None, :, None] >= start, 0.3, 0.0)


def without(name):
    return lambda x, options: (x, {**options, name: None})


PLANTS = {
    "sees ahead from token 64 on": (
        mixer(lambda x, options: (x + late(x, 64) * jnp.roll(x, -1, 1), options)),
        "causality, whole pass",
    ),
    "a row sees the one before it from token 64 on": (
        mixer(lambda x, options: (x + late(x, 64) * jnp.roll(x, 1, 0), options)),
        # First seen there: the rows of one call change from other positions on.
        "causality, whole pass",
    ),
    "one row sees one other row": (
        mixer(lambda x, options: (x.at[1].add(0.3 * x[2]) if len(x) > 2 else x, options)),
        "isolation, whole pass",
    ),
    "documents see each other": (mixer(without("starts")), "isolation, documents in a row"),
    "padding is seen": (mixer(without("mask")), "isolation, padded rows"),
}


@pytest.mark.slow_cases("sees ahead from token 64 on")
@pytest.mark.thorough("sees ahead from token 64 on")
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_of_a_layer_fails_its_line(name):
    plant, expected = PLANTS[name]
    subject = make_subject()
    plant(subject)
    failed = (line for line in model_lines(subject) if line.verdict == "fail")
    found = next(failed)
    assert f"{found.section}, {found.name}" == expected, found.text


@pytest.mark.slow
def test_noise_is_no_tolerance():
    """A thousandth of the inputs' size, drawn anew in each call."""
    rng = np.random.default_rng(0)

    def noisy(x, options):
        draw = jax.pure_callback(
            lambda like: 1e-3 * rng.standard_normal(like.shape).astype(like.dtype),
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            x,
        )
        return x + draw, options

    subject = make_subject()
    mixer(noisy)(subject)
    line = next(iter(model_lines(subject)))
    assert line.verdict == "fail"
    assert line.text.startswith("Two equal calls differ by ")
