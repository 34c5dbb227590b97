"""95 % intervals of the numbers that evaluations report."""

from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

Z95 = 1.959964


class Interval(NamedTuple):
    """Bounds of a 95 % interval."""

    low: float
    high: float


def wilson(successes: int, trials: int) -> Interval:
    """Wilson's 95 % interval of a proportion.

    It stays valid near 0 and 1, where the interval of the normal approximation does not.

    References: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    if trials == 0:
        return Interval(0.0, 1.0)
    share = successes / trials
    spread = Z95 * np.sqrt(share * (1 - share) / trials + (Z95 / (2 * trials)) ** 2)
    centre = share + Z95**2 / (2 * trials)
    scale = 1 + Z95**2 / trials
    # Clipped because rounding leaves -1e-17 at zero successes.
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return Interval(float(max(0.0, low)), float(min(1.0, high)))


def share(successes: int, trials: int) -> dict[str, Any]:
    """A share of right answers for a record: `accuracy`, Wilson's `interval` and `answers`."""
    interval = wilson(successes, trials)
    return {"accuracy": successes / trials, "interval": interval, "answers": trials}


def student_t(values: int) -> float:
    """Half-width, in standard errors, of the 95 % interval of the mean of at least two values."""
    return float(stdtrit(values - 1, 0.975))


def clustered_mean(sums: np.ndarray, sizes: np.ndarray) -> tuple[float, Interval | None]:
    """Mean over all items, with a 95 % interval that allows items of one cluster to be dependent.

    Args:
      sums: `[clusters]`, sum of the items of each cluster.
      sizes: `[clusters]`, number of items of each cluster.

    Returns:
      The mean and its interval; the interval is None with fewer than two clusters. Student's t is
      used because a few clusters estimate the variance only roughly.

    References: the ratio estimator, Cochran 1977, "Sampling techniques", section 6.
    """
    total = float(sizes.sum())
    mean = float(sums.sum()) / total
    clusters = len(sums)
    if clusters < 2:
        return mean, None
    residuals = sums - mean * sizes
    variance = clusters / (clusters - 1) * float(np.sum(residuals**2)) / total**2
    half = student_t(clusters) * float(np.sqrt(variance))
    return mean, Interval(mean - half, mean + half)


def bootstrap(
    sums: np.ndarray, sizes: np.ndarray, units: np.ndarray, *, draws: int = 2000, seed: int = 0
) -> Interval | None:
    """95 % interval of a mean over all items, by drawing units and clusters within them anew.

    Args:
      sums: `[clusters]`, sum of the items of each cluster, such as a document.
      sizes: `[clusters]`, number of items of each cluster.
      units: int `[clusters]`, the unit that each cluster belongs to, such as a training seed.
      seed: of the draws.

    Returns:
      The interval from the 2.5th to the 97.5th percentile; None with a single cluster.

    References: Davison and Hinkley 1997, "Bootstrap methods and their application", section 3.8.
    """
    if len(sums) < 2:
        return None
    rng = np.random.default_rng(seed)
    members = [np.flatnonzero(units == unit) for unit in np.unique(units)]
    means = np.empty(draws)
    for draw in range(draws):
        chosen = rng.integers(len(members), size=len(members))
        drawn = np.concatenate(
            [members[unit][rng.integers(len(members[unit]), size=len(members[unit]))]
             for unit in chosen]
        )  # fmt: skip
        means[draw] = sums[drawn].sum() / sizes[drawn].sum()
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(low), float(high))
