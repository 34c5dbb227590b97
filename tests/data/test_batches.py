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


@pytest.mark.slow_cases("recall-2", "text-2")
@pytest.mark.by_default("recall-0", "text-0")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_restored_iterator_gives_what_the_saved_one_would_have(make_config, num_workers):
    dataset = train(make_config(num_workers=num_workers))
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


@pytest.mark.thorough
def test_the_position_survives_another_number_of_workers(make_config, tmp_path, monkeypatch):
    unbroken = take(iter(train(make_config())), 6)
    received = tmp_path / "received"  # A worker imports nothing from where it was started.
    received.mkdir()
    for name in ("multiprocessing", "pickle", "json", "grain"):
        (received / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(received)
    with_worker = iter(train(make_config(num_workers=1)))
    assert_batches_equal(take(with_worker, 3), unbroken[:3])
    state = with_worker.get_state()
    with_worker.close()
    without = iter(train(make_config()))
    without.set_state(state)
    assert_batches_equal(take(without, 3), unbroken[3:])


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
    with pytest.raises(ValueError, match="is not a position in this data of 5 batches"):
        iter(dataset).set_state(state)


@pytest.mark.slow_cases("recall-1")
@pytest.mark.by_default("recall-0")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_parts_of_the_rows_together_are_the_batches(make_config, num_workers):
    whole = take(iter(train(make_config(), batch_size=6)), 4)
    for rows in (range(2), range(2, 6), (1, 4)):
        iterator = iter(train(make_config(num_workers=num_workers), batch_size=6, rows=rows))
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


@pytest.mark.thorough
def test_an_error_in_a_worker_reaches_the_caller(tmp_path):
    np.asarray([1, 2, 300, 4], "<u2").tofile(tmp_path / "x.bin")
    (tmp_path / "x.idx").write_text("4 0\n")
    config = TextData(train_paths=(str(tmp_path / "x.bin"),), length=3, num_workers=2)
    iterator = iter(train(config, batch_size=1))
    with pytest.raises(ValueError, match="id 300 at token 2, outside a vocabulary of 257"):
        next(iterator)
    iterator.close()
