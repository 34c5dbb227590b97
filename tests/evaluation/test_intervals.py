import numpy as np
import pytest

from fwpkm_jax.evaluation.intervals import clustered_mean, student_t, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", Table I, method 3.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_equals_the_published_table(successes, trials, low, high):
    np.testing.assert_allclose(wilson(successes, trials), (low, high), atol=5e-5)


def test_nothing_tried_is_known_to_be_anything():
    assert wilson(0, 0) == (0.0, 1.0)


def test_clusters_of_one_give_the_interval_of_independent_items():
    items = np.random.default_rng(0).normal(size=50)
    mean, interval = clustered_mean(items, np.ones(50))
    half = 2.009575 * items.std(ddof=1) / np.sqrt(50)
    assert interval is not None
    expected = (items.mean(), mean - half, mean + half)
    np.testing.assert_allclose((mean, *interval), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "errors"), [(2, 12.706), (3, 4.303), (8, 2.365), (31, 2.042), (1000, 1.962)]
)
def test_few_values_reach_as_far_as_students_table_says(values, errors):
    assert student_t(values) == pytest.approx(errors, abs=5e-4)


def test_repeating_an_item_within_its_cluster_tells_nothing_new():
    items = np.random.default_rng(0).normal(size=20)
    once = clustered_mean(items, np.ones(20))
    often = clustered_mean(7 * items, np.full(20, 7))
    np.testing.assert_allclose(once[1], often[1])


def test_clusters_of_unequal_sizes_weigh_by_their_items():
    """Clusters whose items all have one value leave no doubt about it, whatever their sizes."""
    sizes = np.array([1, 7, 3, 20])
    mean, interval = clustered_mean(2.5 * sizes, sizes)
    np.testing.assert_allclose((mean, *interval), 2.5, rtol=1e-12)


def test_the_interval_of_unequal_clusters_is_the_ratio_estimators():
    sums, sizes = np.array([2.0, 9.0, 1.0]), np.array([2, 10, 2])
    mean, (low, high) = clustered_mean(sums, sizes)
    assert mean == pytest.approx(12 / 14)
    # Cochran 1977, Eq. 6.13, by hand: deviations 2/7, 3/7 and -5/7, mean size 14 / 3.
    variance = (4 + 9 + 25) / 49 / 2 / 3 / (14 / 3) ** 2
    np.testing.assert_allclose((high - mean, mean - low), 4.302653 * np.sqrt(variance), rtol=1e-6)


def test_one_cluster_has_no_interval():
    assert clustered_mean(np.array([6.0]), np.array([3])) == (2.0, None)
