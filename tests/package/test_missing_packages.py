"""Packages of the extras: without one, a line says what lacks and which extra brings it."""

import sys

import pytest

from fwpkm_jax.data.tokenizers import SentencePieceTokenizer
from fwpkm_jax.evaluation.display import plot_style
from fwpkm_jax.lazy_imports import import_extra
from fwpkm_jax.training.runs.metrics import TensorBoard


@pytest.fixture
def without(monkeypatch):
    """Makes a package look as if it were not installed."""

    def hide(package):
        for name in [x for x in sys.modules if x.startswith(f"{package}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return hide


def test_results_come_without_pictures_and_one_line_says_so(without, tmp_path, caplog):
    without("matplotlib")
    plot_style._say_that_nothing_is_drawn.cache_clear()

    def plot(directory):
        return [plot_style.save_figure(plot_style.new_figure(1, 1)[0], directory / "a.png")]

    assert plot_style.drawn(plot, tmp_path) == plot_style.drawn(plot, tmp_path) == []
    (record,) = caplog.records
    assert record.getMessage().endswith("run: pip install -e '.[plots]'")
    assert plot_style.drawn(lambda _: [tmp_path], tmp_path) == [tmp_path]  # Pages need none.


def test_a_tokenizer_names_its_extra(without):
    without("sentencepiece")
    with pytest.raises(ImportError, match=r"read by the package sentencepiece.*\[tokenizers\]'"):
        SentencePieceTokenizer(b"", name="tokenizer.model")
    with pytest.raises(ImportError, match=r"^Maps are drawn by the package absent_one, .*\[maps\]"):
        import_extra("absent_one.map", "Maps are drawn", extra="maps")


def test_event_files_are_written_by_their_package_alone(without, tmp_path):
    without("tensorboardX")
    with pytest.raises(ModuleNotFoundError, match="tensorboardX"):  # `RunLog.begin` says it.
        TensorBoard(tmp_path, step=0)
    assert not [*tmp_path.iterdir()]
