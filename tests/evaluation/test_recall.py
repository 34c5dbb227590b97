from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.data import RecallData, make_dataset
from fwpkm_jax.evaluation.intervals import wilson
from fwpkm_jax.evaluation.recall import RECALL, RecallConfig, attention_reach
from fwpkm_jax.models.language_model import LanguageModel
from tests.evaluation.conftest import tiny_model_config

VOCAB = 32
DATA = RecallData(
    length=24, num_facts=2, num_keys=4, num_values=4, num_filler=4, min_distance=8, num_valid=8
)


class Successor(nnx.Module):
    """Answers every token with the next number, once its memory has seen enough batches.

    The memory counts the batches that were written into it.
    """

    def __init__(self, needed: int):
        self.config = tiny_model_config(vocab_size=VOCAB, mixers=("swa", "swa"), window=4)
        self.needed = needed

    def __call__(self, tokens, memory, *, write):
        knows = (memory["layer_1"] + write >= self.needed) & write
        knows = jnp.repeat(knows, tokens.shape[0] // knows.shape[0])[:, None]
        guess = jnp.where(knows, (tokens + 1) % VOCAB, 0)
        memory = {"layer_1": memory["layer_1"] + write}
        return SimpleNamespace(logits=jax.nn.one_hot(guess, VOCAB), memory=memory)


def batch(*answers: tuple[int, bool], rows: int = 2, length: int = 12):
    """Rows of one token, asking at position p for the distance and rightness `answers[p]`."""
    tokens = np.full((rows, length + 1), 3, np.int32)
    distance = np.zeros((rows, length), np.int32)
    # A question about every other token, so that no label is an input.
    for place, (how_far, right) in enumerate(answers):
        tokens[:, 2 * place + 1] = 4 if right else 5
        distance[:, 2 * place] = how_far
    return {"tokens": tokens, "answer_distance": distance}


def evaluate(model, *batches, lifetime="batch", groups=2, memory_groups=1, **options):
    memory = {"layer_1": jnp.zeros((memory_groups,), jnp.int32)}
    return RECALL.of_model(
        model,
        memory,
        config=RecallConfig(**options),
        batches=batches,
        lifetime=lifetime,
        groups=groups,
        num_values=4,
    ).record["results"]


def test_accuracy_is_told_by_distance_with_its_interval():
    results = evaluate(
        Successor(1), batch((2, True), (2, False), (7, True), (11, False), (12, True)), num_bins=3
    )
    found = {
        (b["above"], b["up_to"]): (b["accuracy"], b["answers"])
        for b in results["writing"]["by_distance"]
    }
    assert found == {(0, 4): (0.5, 4), (4, 8): (1.0, 2), (8, 12): (0.5, 4)}
    assert results["writing"]["all"]["accuracy"] == 0.6
    assert tuple(results["writing"]["all"]["interval"]) == wilson(6, 10)
    assert results["frozen"]["all"]["accuracy"] == 0
    assert results["chance"] == 0.25


def test_a_distance_at_a_bound_is_in_the_range_below_it():
    results = evaluate(Successor(1), batch((4, True), (8, False), (12, True)), num_bins=3)
    found = {(b["above"], b["up_to"]): b["answers"] for b in results["writing"]["by_distance"]}
    assert found == {(0, 4): 2, (4, 8): 2, (8, 12): 2}


def test_frozen_reads_see_nothing_that_a_batch_wrote():
    class Reader(Successor):
        """Knows the answers once something is written, and writes whether asked to or not."""

        def __call__(self, tokens, memory, *, write):
            before = {"layer_1": memory["layer_1"] - 1}
            logits = super().__call__(tokens, before, write=True).logits
            return SimpleNamespace(logits=logits, memory={"layer_1": memory["layer_1"] + 1})

    for lifetime, groups in (("batch", 2), ("carried", 1)):
        batches = [batch((3, True)), batch((3, True))]
        results = evaluate(Reader(1), *batches, lifetime=lifetime, groups=groups)
        assert results["frozen"]["all"]["accuracy"] == 0


def test_answers_beyond_the_window_and_beyond_the_reach_of_all_layers_are_told_apart():
    # A window of 4 in 2 layers: 6 tokens back.
    results = evaluate(Successor(1), batch((4, False), (5, False), (6, True), (7, True)))
    assert (results["window"], results["reach"]) == (4, 6)
    assert results["writing"]["beyond_window"]["accuracy"] == pytest.approx(2 / 3)
    assert results["writing"]["beyond_reach"]["accuracy"] == 1
    assert results["writing"]["beyond_reach"]["answers"] == 2


def test_a_carried_memory_keeps_what_earlier_batches_wrote_and_a_batch_memory_does_not():
    batches = [batch((3, True)), batch((3, True))]
    carried = evaluate(Successor(2), *batches, lifetime="carried", groups=1)
    assert carried["writing"]["all"]["accuracy"] == 0.5
    fresh = evaluate(Successor(2), *batches, lifetime="batch", groups=2)
    assert fresh["writing"]["all"]["accuracy"] == 0


def test_the_number_of_batches_is_limited():
    results = evaluate(Successor(1), batch((3, True)), batch((3, False)), batches=1)
    assert results["writing"]["all"]["answers"] == 2


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="2 sequences cannot be shared out among 3"):
        evaluate(Successor(1), batch((3, True)), groups=3)
    with pytest.raises(ValueError, match="has 4 groups and groups=2"):
        evaluate(Successor(1), batch((3, True)), memory_groups=4)


def test_batches_without_a_question_are_refused():
    with pytest.raises(ValueError, match="ask no question"):
        evaluate(Successor(1), batch())


def test_a_model_in_hand_needs_batches_and_the_number_of_answers():
    model, memory = Successor(1), {"layer_1": jnp.zeros((1,), jnp.int32)}
    with pytest.raises(ValueError, match="num_values=None: give the number of possible answers"):
        RECALL.of_model(model, memory, config=RecallConfig(), batches=[batch((3, True))])
    with pytest.raises(ValueError, match="batches=None: give batches"):
        RECALL.of_model(model, memory, config=RecallConfig(), num_values=4)
    own = RECALL.of_model(
        model, memory, config=RecallConfig(), batches=[batch((3, True))], groups=2, data=DATA
    )
    assert own.record["results"]["chance"] == 1 / DATA.num_values


@pytest.mark.parametrize("mixers", [("swa", "gdn"), ("attention",)])
def test_layers_that_remember_the_past_have_no_reach(mixers):
    assert attention_reach(tiny_model_config(mixers=mixers, memory_layers=())).stack is None


@pytest.mark.slow
def test_an_untrained_model_is_scored_as_its_own_pass_says():
    config = tiny_model_config(vocab_size=DATA.vocab_size, mixers=("swa", "swa"))
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    memory = model.init_memory(jax.random.key(0))
    batches = list(make_dataset(DATA, split="valid", batch_size=4, seed=0))
    result = RECALL.of_model(
        model,
        memory,
        config=RecallConfig(),
        batches=batches,
        lifetime="batch",
        groups=4,
        num_values=DATA.num_values,
    )
    expected = []
    own = jax.tree.map(lambda x: jnp.repeat(x, 4, axis=0), memory)
    graphdef, params = nnx.split(model)
    read = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens, own).logits)
    for one in batches:
        guess = np.argmax(read(params, one["tokens"][:, :-1]), axis=-1)
        expected.append((guess == one["tokens"][:, 1:])[one["answer_distance"] > 0])
    np.testing.assert_array_equal(result.arrays["right_writing"], np.concatenate(expected))
    assert result.record["provenance"]["scored_tokens"] == 8 * 2
