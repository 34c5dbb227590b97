"""Differences between two passes over the same tokens."""

import numpy as np
import pytest

from fwpkm_jax.evaluation.intervals import clustered_mean
from fwpkm_jax.evaluation.readers.token_losses import TokenLosses, differences


def losses(loss, *, document, segment):
    count = len(loss)
    return TokenLosses(
        source=np.zeros(count, np.int8),
        document=np.asarray(document, np.int32),
        segment=np.asarray(segment, np.int32),
        position=np.zeros(count, np.int32),
        loss=np.asarray(loss, np.float32),
        document_ids=[str(number) for number in np.unique(document)],
    )


@pytest.mark.parametrize(
    ("document", "segment", "clusters"),
    [
        ([0, 0, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0], [2, 1, 3]),  # Documents of one segment each.
        ([0, 0, 0, 0, 0, 0], [0, 0, 1, 2, 2, 2], [2, 1, 3]),  # Segments of one document.
        ([0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 2, 2], [1, 1, 2, 2]),  # Both at once.
    ],
)
def test_each_segment_of_each_document_is_one_draw(document, segment, clusters):
    rng = np.random.default_rng(0)
    layout = {"document": document, "segment": segment}
    writing, frozen = (losses(rng.normal(size=6), **layout) for _ in range(2))
    found = differences(writing, frozen, ["text"])["all"]
    changes = np.split(writing.loss.astype(float) - frozen.loss, np.cumsum(clusters)[:-1])
    mean, interval = clustered_mean(np.array([x.sum() for x in changes]), np.array(clusters))
    assert found["segments"] == len(clusters)
    assert found["loss"] == pytest.approx(mean)
    assert interval is not None
    np.testing.assert_allclose(found["interval"], interval, rtol=1e-9)
