import numpy as np
import pytest

from fwpkm_jax.evaluation.addressing import AddressingWindows


def windows_of(*segments: list[int], num_slots: int = 16, per_window: int = 1):
    windows = AddressingWindows(num_slots, segments=per_window)
    for slots in segments:
        windows.add({"layer_1": np.array(slots, np.int32).reshape(-1, 1)})
    return windows.means()


def test_uniform_access_diverges_by_nothing_and_covers_everything():
    measured = windows_of(list(range(16)))["layer_1"]
    assert measured["kld"] == pytest.approx(0, abs=1e-6)
    assert measured["coverage"] == 1
    assert measured["collision"] == 0


def test_a_single_slot_diverges_by_the_log_of_the_slots():
    measured = windows_of([3] * 10)["layer_1"]
    assert measured["kld"] == pytest.approx(np.log(16), rel=1e-6)
    assert measured["coverage"] == 1 / 16
    assert measured["collision"] == 1


def test_a_window_joins_its_segments_and_the_last_incomplete_one_is_dropped():
    # Slot 0 is read once in each of the first two segments: a collision only if they are joined.
    measured = windows_of([0, 1], [0], [5, 5], per_window=2)["layer_1"]
    assert measured["windows"] == 1
    assert measured["collision"] == pytest.approx(2 / 3)
    assert measured["coverage"] == pytest.approx(2 / 16)


@pytest.mark.thorough
def test_windows_and_then_layers_are_averaged():
    windows = AddressingWindows(4, segments=1)
    windows.add({"layer_0": np.array([0, 1]), "layer_2": np.array([0, 1])})
    windows.add({"layer_0": np.array([0, 1, 2, 3]), "layer_2": np.array([0, 0])})
    means = windows.means()
    assert means["layer_0"]["coverage"] == pytest.approx(0.75)
    assert means["layer_2"]["coverage"] == pytest.approx(0.375)
    assert means["mean"]["coverage"] == pytest.approx(0.5625)


def test_nothing_is_reported_before_the_first_full_window():
    assert windows_of([1], per_window=8) == {}
