from functools import partial

import jax
import matplotlib.image
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.data import TextData
from fwpkm_jax.data.packing import PackedRows
from fwpkm_jax.evaluation import Subject
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.paper.evaluation import gates_views as views
from fwpkm_jax.paper.evaluation.gates import GATES, GatesConfig
from tests.evaluation.conftest import tiny_model_config

LENGTH = 20


def rows(number: int, seed: int) -> PackedRows:
    tokens = np.random.default_rng(seed).integers(30, size=number * (LENGTH + 1))
    return PackedRows([tokens.astype(np.int32)], length=LENGTH)


SOURCES = {"books": rows(3, 0), "web": rows(2, 1)}  # Batches of 2, 1 and 2 rows.


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    config = tiny_model_config(mixers=("swa", "swa"), memory_layers=(0, 1), init_std=1.0)
    return LanguageModel(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def memory(model):
    return model.init_memory(jax.random.key(1))


@pytest.fixture(scope="module")
def result(model, memory):
    return GATES.of_model(model, memory, config=GatesConfig(batch_size=2), sources=SOURCES)


@partial(jax.jit, static_argnames="graphdef")
def whole_pass(graphdef, params, memory, tokens):
    out = nnx.merge(graphdef, params)(tokens, memory)
    return out.memory, {layer: facts.gate for layer, facts in out.info.items()}


@pytest.mark.thorough
def test_histograms_count_every_gate_while_one_memory_is_carried_on(model, memory, result):
    gates: dict[str, list] = {"books": [], "web": []}
    for name, batch in (("books", [0, 1]), ("books", [2]), ("web", [0, 1])):
        tokens = np.stack([SOURCES[name][row]["tokens"][:-1] for row in batch])
        memory, found = whole_pass(*nnx.split(model), memory, tokens)
        gates[name].append(np.asarray(found["layer_1"]).ravel())
    for number, name in enumerate(SOURCES):
        values = np.concatenate(gates[name])
        bins = np.minimum((values * 10).astype(int), 9)
        expected = np.bincount(bins, minlength=10)
        np.testing.assert_array_equal(result.arrays["counts"][number, 1], expected)
        one = result.record["results"]["gates"][name]["layer_1"]
        np.testing.assert_allclose(one["share"], expected / len(values))
        assert one["mean"] == pytest.approx(float(values.mean()), abs=1e-6)
        assert np.count_nonzero(expected) > 3  # Not all in one place.
    assert result.record["results"]["tokens"] == {"books": 3 * LENGTH, "web": 2 * LENGTH}
    assert result.record["provenance"]["scored_tokens"] == 5 * LENGTH


@pytest.mark.slow
def test_table_picture_and_sentence_tell_the_same(result, tmp_path):
    means = {
        (name, layer): one["mean"]
        for name, layers in result.record["results"]["gates"].items()
        for layer, one in layers.items()
    }
    table = views.table(result.record)
    assert all(f"{mean:.4f}" in table for mean in means.values())
    layer_0 = (3 * means["books", "layer_0"] + 2 * means["web", "layer_0"]) / 5
    assert f"{layer_0:.2f} in layer 0" in views.finding(result.record)
    (path,) = views.plot(result.record, tmp_path)
    assert np.mean(np.any(matplotlib.image.imread(path)[..., :3] < 0.9, axis=-1)) > 0.01


def test_a_model_without_gates_is_refused_and_skipped():
    model = LanguageModel(tiny_model_config(memory_layers=(), mixers=("swa",)), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="no gates"):
        GATES.of_model(model, {}, config=GatesConfig(), sources=SOURCES)
    subject = Subject(
        model=model,
        memory={},
        data=TextData(train_paths=("unused.txt",)),
        lifetime="carried",
        groups=1,
        batch_size=2,
    )
    assert GATES.missing(subject, GatesConfig()) == "a memory layer"


@pytest.mark.parametrize("field", ["batch_size", "max_batches", "chunk_size"])
def test_options_below_1_are_refused(field):
    with pytest.raises(ValueError, match=f"{field}=0"):
        GatesConfig(**{field: 0})
