import itertools
from typing import get_args

import numpy as np
import pytest

from lab.comparison.state_tracking_data import (
    Group,
    StateTrackingData,
    StateTrackingSource,
    multiplication_table,
)

GROUPS = get_args(Group)


@pytest.mark.parametrize("group", GROUPS)
def test_tables_are_groups_and_only_permutations_mind_the_order(group):
    table = multiplication_table(group)
    elements = range(len(table))
    np.testing.assert_array_equal(table[0], elements)
    np.testing.assert_array_equal(table[:, 0], elements)
    for row in (*table, *table.T):  # Each equation a x = b has one solution.
        assert sorted(row) == list(elements)
    np.testing.assert_array_equal(table[table], table[:, table])  # (a b) c = a (b c)
    assert (table == table.T).all() == (group not in ("s3", "s5"))


@pytest.mark.parametrize(("group", "order"), [("parity", 2), ("mod3", 3), ("mod5", 5)])
def test_labels_of_the_cyclic_groups_are_running_sums(group, order):
    source = StateTrackingSource(StateTrackingData(group=group, length=50), split="train", seed=1)
    for index in range(5):
        example = source[index]
        np.testing.assert_array_equal(example["labels"], np.cumsum(example["tokens"]) % order)


def test_labels_of_s3_are_what_permuting_three_things_in_turn_gives():
    permutations = list(itertools.permutations(range(3)))
    source = StateTrackingSource(StateTrackingData(group="s3", length=50), split="train", seed=1)
    example = source[0]
    points = (0, 1, 2)  # Where each thing is by now.
    for token, label in zip(example["tokens"], example["labels"], strict=True):
        points = tuple(permutations[token][point] for point in points)
        assert permutations[label] == points


def test_every_token_changes_every_later_label():
    table = multiplication_table("mod3")
    example = StateTrackingSource(StateTrackingData(group="mod3"), split="train", seed=0)[0]
    tokens = example["tokens"].copy()
    tokens[10] = (tokens[10] + 1) % len(table)
    labels = np.cumsum(tokens) % 3
    assert (labels[:10] == example["labels"][:10]).all()
    assert (labels[10:] != example["labels"][10:]).all()


def test_a_document_is_a_function_of_seed_index_and_split():
    def document(split, seed, index):
        example = StateTrackingSource(StateTrackingData(), split=split, seed=seed)[index]
        assert {(x.shape, x.dtype.name) for x in example.values()} == {((64,), "int32")}
        return tuple(example["tokens"].tolist())

    places = list(itertools.product(("train", "valid"), (0, 1), (0, 1)))
    documents = [document(*place) for place in places]
    assert documents == [document(*place) for place in places]
    assert len(set(documents)) == len(places)


def test_a_configuration_that_cannot_be_met_is_refused():
    with pytest.raises(ValueError, match=r"group='z4' is none of .*'parity'"):
        StateTrackingData(group="z4")
    with pytest.raises(ValueError, match="length=0 must be at least 1"):
        StateTrackingData(length=0)
