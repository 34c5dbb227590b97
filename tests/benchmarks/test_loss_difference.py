import json
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from benchmarks.paper.loss_difference import main
from fwpkm_jax.evaluation.record import Result, save_result

LENGTHS = (10, 7, 4)  # Tokens of each document; the last is of another data set.


def save_run(path: Path, losses: np.ndarray, **provenance) -> Path:
    document = np.repeat(np.arange(3, dtype=np.int32), LENGTHS)
    position = np.concatenate([np.arange(n, dtype=np.int32) for n in LENGTHS])
    record = {
        "evaluation": "ppl",
        "provenance": {
            "checkpoint": {"step": 1},
            "data_files": {f"{path.name}/a.txt": "hash"},
            "tokenizer": "bytes",
            "mode": "overlap",
        }
        | provenance,
        "results": {"writing": {"by_source": {"books": {}, "web": {}}}},
    }
    arrays = {
        "source": (document == 2).astype(np.int8),
        "document": document[: len(losses)],
        "segment": position // 5,
        "position": position % 5,
        "loss_writing": losses.astype(np.float32),
    }
    save_result(Result(record, arrays), path / "results")
    return path


@pytest.fixture
def losses() -> list[np.ndarray]:
    return list(np.random.default_rng(0).random((2, sum(LENGTHS))))


@pytest.fixture
def runs(losses, tmp_path) -> list[str]:
    saved = zip("ab", losses, strict=True)
    return [str(save_run(tmp_path / name, loss)) for name, loss in saved]


def test_the_difference_is_followed_from_each_documents_start(losses, runs, capsys):
    assert main([*runs, "--documents", "2", "--tokens", "4"]) == 0
    saved = Path(runs[0], "results", "ppl_minus_b.json")
    found = json.loads(saved.read_text())
    difference = losses[0] - losses[1]
    first, second = found["curves"]
    assert first["ends"] == [4, 8, 10]
    assert second["ends"] == [4, 7]
    expected = [difference[:4].mean(), difference[:8].mean(), difference[:10].mean()]
    np.testing.assert_allclose(first["mean"], expected, rtol=1e-5)
    np.testing.assert_allclose(second["mean"][-1], difference[10:17].mean(), rtol=1e-5)
    by_source = found["difference"]["by_source"]
    assert by_source["books"]["loss"] == pytest.approx(difference[:17].mean(), abs=1e-6)
    assert by_source["web"]["loss"] == pytest.approx(difference[17:].mean(), abs=1e-6)
    assert found["scored_tokens"] == 21
    assert f"{found['difference']['all']['loss']:+.4f}" in capsys.readouterr().out
    image = matplotlib.image.imread(saved.with_suffix(".png"))[..., :3]
    assert np.mean(np.any(image < 0.9, axis=-1)) > 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_files": {"b/a.txt": "other"}}, "data_files"),
        ({"mode": "reference"}, "mode overlap and reference"),
    ],
)
def test_losses_of_other_tokens_are_not_compared(changes, message, losses, runs, tmp_path, capsys):
    other = save_run(tmp_path / "c", losses[1], **changes)
    assert main([runs[0], str(other)]) == 2
    assert message in capsys.readouterr().err


def test_losses_of_fewer_tokens_are_not_compared(losses, runs, tmp_path, capsys):
    short = save_run(tmp_path / "c", losses[1][:-2])
    assert main([runs[0], str(short)]) == 2
    assert "scored 21 and 19 tokens" in capsys.readouterr().err


def test_what_was_not_evaluated_is_said(runs, tmp_path, capsys):
    assert main([runs[0], str(tmp_path / "none")]) == 2
    assert "run fwpkm eval" in capsys.readouterr().err
    assert main([*runs, "--memory", "frozen"]) == 2
    assert "no pass with the memory frozen" in capsys.readouterr().err
