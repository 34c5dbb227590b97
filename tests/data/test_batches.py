import itertools
import json

import grain
import numpy as np
import pytest

from fwpkm_jax.data import RecallData, TextData, make_dataset

SMALL = {"length": 40, "num_facts": 3, "min_distance": 16, "num_valid": 10}


@pytest.fixture
def text(tmp_path):
    for name, size in (("a", 700), ("b", 400)):
        (tmp_path / f"{name}.txt").write_bytes(bytes(np.arange(size, dtype=np.uint16) % 128))
    return {
        "train_paths": (str(tmp_path / "a.txt"), str(tmp_path / "b.txt")),
        "valid_paths": (str(tmp_path / "b.txt"),),
        "length": 9,
    }


@pytest.fixture(params=["recall", "text"])
def make_config(request, text):
    if request.param == "recall":
        return lambda **fields: RecallData(**{**SMALL, **fields})
    return lambda **fields: TextData(**{**text, **fields})


def train(config, **arguments):
    return make_dataset(config, **{"split": "train", "batch_size": 2, "seed": 0, **arguments})


def take(iterator, number):
    return list(itertools.islice(iterator, number))


def assert_batches_equal(actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_a_restored_iterator_gives_what_the_saved_one_would_have(make_config):
    dataset = train(make_config())
    unbroken = take(train(make_config()).__iter__(), 9)
    first = iter(dataset)
    assert_batches_equal(take(first, 4), unbroken[:4])
    state = json.loads(json.dumps(first.get_state()))
    assert_batches_equal(take(first, 2), unbroken[4:6])
    first.set_state(state)  # Back, in an iterator that has read ahead.
    assert_batches_equal(take(first, 2), unbroken[4:6])
    first.close()
    second = iter(dataset)
    second.set_state(state)
    assert second.get_state() == state
    assert_batches_equal(take(second, 5), unbroken[4:])
    second.close()


def test_grains_checkpoint_handler_takes_the_iterator(make_config, tmp_path):
    iterator = iter(train(make_config()))
    take(iterator, 3)
    handler = grain.checkpoint.CheckpointHandler()
    handler.save(tmp_path, item=iterator)
    restored = iter(train(make_config()))
    handler.restore(tmp_path, item=restored)
    assert_batches_equal(take(restored, 2), take(iterator, 2))


@pytest.mark.parametrize(
    "state", [{"next_index": -1}, {"next_index": 6}, {"index": 3}, {"next_index": 1.0}, 3, None]
)
def test_a_state_that_is_no_position_is_refused(state):
    dataset = make_dataset(RecallData(**SMALL), split="valid", batch_size=2, seed=0)
    with pytest.raises(ValueError, match="is not a position in this data"):
        iter(dataset).set_state(state)


def test_parts_of_the_rows_together_are_the_batches(make_config):
    whole = take(iter(train(make_config(), batch_size=6)), 4)
    for rows in (range(2), range(2, 6), (1, 4)):
        iterator = iter(train(make_config(), batch_size=6, rows=rows))
        iterator.set_state(
            {**iterator.get_state(), "next_index": 1}
        )  # The position is that of the whole batches.
        expected = [{name: x[list(rows)] for name, x in batch.items()} for batch in whole[1:]]
        assert_batches_equal(take(iterator, 3), expected)
        iterator.close()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("batch_size", [2, 4, 16])
def test_validation_gives_every_example_once_and_fills_up_with_weight_zero(
    make_config, parts, batch_size
):
    config = make_config()
    every = [
        batch["tokens"][0] for batch in make_dataset(config, split="valid", batch_size=1, seed=0)
    ]
    per_part = batch_size // parts
    batches = [
        list(make_dataset(config, split="valid", batch_size=batch_size, seed=0, rows=rows))
        for rows in (range(i * per_part, (i + 1) * per_part) for i in range(parts))
    ]
    assert len({len(part) for part in batches}) == 1
    assert all(len(batch["tokens"]) == per_part for part in batches for batch in part)
    tokens, weights = (
        np.concatenate(
            [batch[name] for together in zip(*batches, strict=True) for batch in together]
        )
        for name in ("tokens", "loss_weight")
    )
    np.testing.assert_array_equal(tokens[: len(every)], every)
    assert weights[: len(every)].any(axis=1).all()
    assert not weights[len(every) :].any()


def test_validation_can_be_read_again_and_ends(make_config):
    dataset = make_dataset(make_config(), split="valid", batch_size=4, seed=0)
    iterator = iter(dataset)
    first = list(iterator)
    assert next(iterator, None) is None
    iterator.set_state({"next_index": len(first)})
    assert next(iterator, None) is None
    assert_batches_equal(list(dataset), first)


def test_training_and_validation_of_the_recall_task_share_no_document():
    config = RecallData(**SMALL)
    seen = {row.tobytes() for batch in take(iter(train(config)), 200) for row in batch["tokens"]}
    valid = make_dataset(config, split="valid", batch_size=5, seed=0)
    assert not any(row.tobytes() in seen for batch in valid for row in batch["tokens"])
