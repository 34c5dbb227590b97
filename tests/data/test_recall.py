import numpy as np
import pytest

from fwpkm_jax.data.recall import RecallData, RecallSource

CONFIGS = {
    "default": RecallData(),
    "many_keys": RecallData(num_keys=2048, num_filler=3),
    "some_questions": RecallData(num_questions=3, other_loss_weight=0.25),
    "no_room_to_spare": RecallData(length=31, num_facts=5, num_questions=2, min_distance=20),
    "one_fact": RecallData(length=3, num_facts=1, min_distance=2, num_filler=1),
    "long": RecallData(length=1024, min_distance=512),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_answers_are_what_a_reader_with_a_dictionary_would_say(config):
    source = RecallSource(config, split="train", seed=3)
    for index in range(20):
        example = source[index]
        tokens = example["tokens"].tolist()
        assert len(tokens) == config.length + 1
        stated, distance = {}, [0] * config.length
        for position, token in enumerate(tokens[:-1]):
            if config.first_key <= token < config.first_value:
                if token in stated:
                    value_position = stated[token] + 1
                    assert tokens[position + 1] == tokens[value_position]
                    distance[position] = position + 1 - value_position
                else:
                    stated[token] = position
                    assert config.first_value <= tokens[position + 1] < config.vocab_size
        assert example["answer_distance"].tolist() == distance
        assert len(stated) == config.num_facts
        asked = example["answer_distance"] > 0
        assert asked.sum() == config.questions_per_document
        expected_weight = np.where(asked, 1, config.other_loss_weight).astype(np.float32)
        np.testing.assert_array_equal(example["loss_weight"], expected_weight)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_no_answer_is_nearer_than_the_minimum_and_some_reach_it(config):
    source = RecallSource(config, split="train", seed=0)
    distances = np.concatenate([source[index]["answer_distance"] for index in range(300)])
    distances = distances[distances > 0]
    assert distances.min() >= config.min_distance
    # The last value and the first answer are rarely both at the edge: allow some tokens.
    assert distances.min() <= config.min_distance + 32
    assert distances.max() <= config.length - 1


def test_distances_vary_up_to_the_length_of_the_document():
    config = RecallData()
    source = RecallSource(config, split="train", seed=0)
    distances = np.concatenate([source[index]["answer_distance"] for index in range(200)])
    counts, _ = np.histogram(distances[distances > 0], bins=5, range=(96, 256))
    assert (counts > 20).all()


def test_shapes_and_types_do_not_depend_on_the_document():
    source = RecallSource(
        RecallData(length=100, num_facts=4, min_distance=40), split="train", seed=0
    )
    for index in (0, 1, 2**40):
        example = source[index]
        assert {name: (array.shape, array.dtype.name) for name, array in example.items()} == {
            "tokens": ((101,), "int32"),
            "loss_weight": ((100,), "float32"),
            "answer_distance": ((100,), "int32"),
        }


def test_a_document_is_a_function_of_seed_index_and_split():
    def tokens(split, seed, index):
        return RecallSource(RecallData(), split=split, seed=seed)[index]["tokens"].tolist()

    places = [
        (split, seed, index) for split in ("train", "valid") for seed in (0, 1) for index in (0, 1)
    ]
    documents = [tokens(*place) for place in places]
    assert documents == [tokens(*place) for place in places]
    assert len({tuple(document) for document in documents}) == len(places)


def test_a_key_says_nothing_about_its_value_across_documents():
    config = RecallData(num_keys=16, num_values=8)
    source = RecallSource(config, split="train", seed=0)
    counts = np.zeros((config.num_keys, config.num_values))
    num_documents = 1500
    for index in range(num_documents):
        tokens = source[index]["tokens"]
        stated = np.flatnonzero((tokens >= config.first_key) & (tokens < config.first_value))[:16]
        np.add.at(
            counts, (tokens[stated] - config.first_key, tokens[stated + 1] - config.first_value), 1
        )
    np.testing.assert_array_equal(counts.sum(1), num_documents)
    # Five standard deviations of a uniform draw.
    tolerance = 5 * np.sqrt(1 / 8 * 7 / 8 / num_documents)
    np.testing.assert_allclose(counts / num_documents, 1 / 8, atol=tolerance)


def test_the_length_the_error_asks_for_suffices():
    assert len(RecallSource(RecallData(length=157), split="train", seed=0)[0]["tokens"]) == 158
