import matplotlib.image
import numpy as np
import pytest

from fwpkm_jax.evaluation import perplexity_views, recall_views
from fwpkm_jax.evaluation.intervals import wilson
from fwpkm_jax.evaluation.needle import needle_views


def share(right: int, answers: int) -> dict:
    return {
        "accuracy": right / answers,
        "interval": list(wilson(right, answers)),
        "answers": answers,
    }


def recall_record(right: int, frozen: int = 1) -> dict:
    def scores(right):
        bins = [{"above": 8 * i, "up_to": 8 * i + 8} | share(right, 40) for i in range(4, 8)]
        return {"all": share(4 * right, 160), "by_distance": bins}

    return {
        "results": {
            "writing": scores(right),
            "frozen": scores(frozen),
            "chance": 1 / 64,
            "window": 8,
            "reach": 16,
            "length": 64,
        }
    }


def perplexity_record(gain: float) -> dict:
    frozen = np.linspace(2, 1.5, 7)
    curve = {"document": "a", "tokens": 820, "run": 128, "frozen": frozen.tolist()}
    shorter = {**curve, "tokens": 600, "frozen": frozen[:5].tolist()}
    curves = [c | {"writing": (np.array(c["frozen"]) - gain).tolist()} for c in (curve, shorter)]
    return {"results": {"writing": {}, "frozen": {}, "curves": curves}}


def needle_record(right: int) -> dict:
    depths = [{"from": 10.0 * i, "to": 10.0 * i + 10} | share(right, 20) for i in (0, 3, 9)]
    runs = [
        {"words": words, "readings": n, "exact": share(right, 20), "by_depth": depths}
        | {"progress": [min(i, right) for i in range(1, 21)]}
        for words in (500, 4000)
        for n in (1, 2)
    ]
    return {"results": {"runs": runs}}


CASES = {
    "recall": (recall_views.plot, lambda better: recall_record(39 if better else 10)),
    "ppl": (perplexity_views.plot, lambda better: perplexity_record(0.2 if better else 0.01)),
    "needle": (needle_views.plot, lambda better: needle_record(19 if better else 2)),
    "needle_depth": (needle_views.plot, lambda better: needle_record(19 if better else 2)),
}


@pytest.mark.by_default("recall", thorough=["ppl"])
@pytest.mark.parametrize("name", CASES)
def test_a_picture_shows_its_numbers(name, tmp_path):
    plot, record = CASES[name]
    images = []
    for better in (True, False):
        (path,) = (p for p in plot(record(better), tmp_path / str(better)) if p.stem == name)
        images.append(matplotlib.image.imread(path))
    # Other numbers, another picture; and ink on both.
    size = [min(image.shape[axis] for image in images) for axis in (0, 1)]
    first, second = (image[: size[0], : size[1], :3] for image in images)
    assert np.mean(np.any(first != second, axis=-1)) > 0.005
    assert np.mean(np.any(first < 0.9, axis=-1)) > 0.01


def test_running_means_weigh_a_short_last_run_by_its_tokens():
    curve = {"tokens": 5, "run": 4, "writing": [1.0, 6.0]}
    np.testing.assert_allclose(perplexity_views._running(curve, "writing"), [1.0, 2.0])
    np.testing.assert_array_equal(perplexity_views._positions(curve), [4, 5])


def test_texts_without_a_curve_give_no_picture(tmp_path):
    record = {"results": {"writing": {}, "curves": []}}
    assert perplexity_views.plot(record, tmp_path) == []
