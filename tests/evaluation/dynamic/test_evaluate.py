"""Dynamic evaluation against gradient steps written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fwpkm_jax.cli.eval_command import parse
from fwpkm_jax.data import Document, TextData
from fwpkm_jax.evaluation import Subject, run_suite
from fwpkm_jax.evaluation.dynamic.evaluate import DynamicConfig
from fwpkm_jax.evaluation.dynamic.reader import read_dynamically
from fwpkm_jax.evaluation.readers.gradient_steps import GradientSteps
from fwpkm_jax.models.language_model import LanguageModel
from tests.evaluation.conftest import tiny_model_config

CHUNK, SEGMENT = 4, 8
STEPS = GradientSteps(learning_rate=0.5, decay=0.25, chunk_length=CHUNK)
# A window of one token hands nothing from chunk to chunk but the weights.
ALONE = tiny_model_config(mixers=("swa",), window=1, memory_layers=())


@functools.cache
def build(config=ALONE):
    return LanguageModel(config, rngs=nnx.Rngs(0))


@functools.cache
def gradient(graphdef):
    def loss(params, tokens):
        logits = nnx.merge(graphdef, params)(tokens[None, :-1], {}).logits[0]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:])
        return jnp.mean(losses), losses

    return jax.jit(jax.grad(loss, has_aux=True))


def document(length, seed):
    return np.random.default_rng(seed).integers(0, 9, size=length).astype(np.int32)


def read(model, documents, steps):
    named = (Document(str(i), tokens) for i, tokens in enumerate(documents))
    return read_dynamically(model, [named], segment_length=SEGMENT, steps=steps)


@pytest.mark.thorough
@pytest.mark.parametrize("reset", ["document", "never"])
def test_after_every_chunk_all_weights_take_a_step_and_decay_back(reset):
    graphdef, trained = nnx.split(build())
    documents = [document(15, 0), document(6, 1)]  # The last chunks are short.
    params, expected = trained, []
    for tokens in documents:
        params = trained if reset == "document" else params
        for first in range(0, len(tokens) - 1, CHUNK):
            gradients, losses = gradient(graphdef)(params, tokens[first : first + CHUNK + 1])
            expected.append(losses)
            params = jax.tree.map(
                lambda w, g, start: w - 0.5 * g + 0.25 * (start - w), params, gradients, trained
            )
    steps = GradientSteps(learning_rate=0.5, decay=0.25, chunk_length=CHUNK, reset=reset)
    reading = read(build(), documents, steps)
    np.testing.assert_allclose(reading.losses.loss, np.concatenate(expected), rtol=2e-5)
    np.testing.assert_array_equal(np.bincount(reading.losses.document), [14, 5])
    assert reading.tokens_per_second is not None


@pytest.mark.thorough
def test_without_a_rate_chunks_read_as_the_whole_segment_does():
    model = build(tiny_model_config(mixers=("swa", "gdn"), memory_layers=()))
    documents = [document(2 * SEGMENT + 3, 2)]
    chunks = read(model, documents, GradientSteps(learning_rate=0.0, chunk_length=CHUNK))
    whole = read(model, documents, None)
    np.testing.assert_allclose(chunks.losses.loss, whole.losses.loss, rtol=1e-5)
    np.testing.assert_array_equal(whole.losses.segment, [0] * SEGMENT + [1] * SEGMENT + [2] * 2)


@pytest.mark.thorough
def test_the_suite_tells_what_steps_bring_and_cost(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("to and fro and " * 4)
    data = TextData(
        train_paths=("none",), valid_paths=(str(tmp_path / "text.txt"),), length=SEGMENT
    )
    subject = Subject(
        model=build(), memory={}, data=data, lifetime="carried", groups=1, batch_size=1
    )
    options = DynamicConfig(steps=STEPS)
    (result,) = run_suite(
        subject, ("dynamic",), directory=tmp_path, configs={"dynamic": options}
    ).values()
    results = result.record["results"]
    assert results["plain"]["all"]["tokens"] == 4 * 15
    change = np.mean(result.arrays["loss_dynamic"] - result.arrays["loss_plain"])
    assert results["difference"]["all"]["loss"] == pytest.approx(change, abs=1e-6)
    assert change < 0  # Of a text that repeats itself.
    assert f"{results['dynamic']['all']['perplexity']:.4f}" in capsys.readouterr().out


def test_options_are_reached_from_the_command_line():
    options = parse(
        ["run", "--dynamic.steps.learning_rate", "0.25", "--dynamic.max_documents", "2"]
    )
    assert options.dynamic.steps == GradientSteps(learning_rate=0.25)
    assert options.dynamic.max_documents == 2


def test_a_model_with_a_fast_weight_memory_is_refused():
    with pytest.raises(ValueError, match=r"layers \(1,\).*memory_layers=\(\)"):
        read(LanguageModel(tiny_model_config(), rngs=nnx.Rngs(0)), [document(9, 0)], STEPS)


@pytest.mark.parametrize(("field", "value"), [("learning_rate", -1.0), ("decay", 2.0)])
def test_steps_that_make_no_sense_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        GradientSteps(**{field: value})
