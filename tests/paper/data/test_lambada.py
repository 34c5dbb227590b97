import pyarrow
import pyarrow.parquet
import pytest

from fwpkm_jax.paper.data.lambada import lambada

MISSING = (FileNotFoundError, ValueError)
NOVELS = {
    "train-novels/Adventure/a_novel.txt": "the sea was calm .\nit was .\n",
    "train-novels/Adventure/long.txt": "x" * 70_000,
    "train-novels/Romance/b.txt": "  später , she said .",
    "train-novels/Romance/blank.txt": "\n",
}
TEXTS = [text.strip() for text in NOVELS.values() if text.strip()]


@pytest.fixture
def published(tmp_path):
    """The unpacked archive, and the Parquet files."""
    for name, text in NOVELS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    parquet = tmp_path / "plain_text"
    parquet.mkdir()
    for number, rows in enumerate([[*NOVELS.values()][:1], [*NOVELS.values()][1:]]):
        table = {"text": [row.strip() for row in rows], "domain": ["Adventure"] * len(rows)}
        name = f"train-0000{number}-of-00002.parquet"
        pyarrow.parquet.write_table(pyarrow.table(table), parquet / name)
    table = pyarrow.table({"text": ["a passage"], "domain": [None]})
    pyarrow.parquet.write_table(table, parquet / "test-00000-of-00001.parquet")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    ["train-novels", "plain_text"],
)
def test_each_form_holds_the_same_novels(published, name, texts_of, goes_on):
    source = lambada(published / name)
    assert texts_of(source) == TEXTS
    for span in source.spans:
        assert span.part.count() >= len(goes_on(span.part))


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_what_is_missing_is_said_with_its_address(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(MISSING, match=r"cimec/lambada.*zenodo\.org/records/2630551"):
        lambada(tmp_path / name)
