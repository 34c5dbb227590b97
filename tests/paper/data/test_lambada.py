import io
import tarfile

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


def add(archive, name, content, kind=tarfile.REGTYPE):
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, len(content)
    if kind == tarfile.SYMTYPE:
        member.linkname, member.size = "/etc/passwd", 0
    archive.addfile(member, io.BytesIO(content))


def novels_archive(files=NOVELS):
    """`train-novels.tar`, with members that are not novels and that nobody should unpack."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        add(archive, "train-novels", b"", tarfile.DIRTYPE)
        add(archive, "train-novels/Adventure", b"", tarfile.DIRTYPE)
        add(archive, "../../outside.txt", b"no")
        add(archive, "/tmp/train-novels.txt", b"no")
        add(archive, "train-novels/Adventure/link.txt", b"", tarfile.SYMTYPE)
        add(archive, "train-novels/Adventure/._a_novel.txt", b"\x00\xff no")
        add(archive, "train-novels/README", b"no")
        for name, text in files.items():
            add(archive, name, text.encode())
    return content.getvalue()


@pytest.fixture
def published(tmp_path):
    """The archive as published, the novels' archive within it, and that unpacked."""
    inner = novels_archive()
    (tmp_path / "train-novels.tar").write_bytes(inner)
    with tarfile.open(tmp_path / "lambada-dataset.tar.gz", "w:gz") as archive:
        add(archive, "./lambada_test_plain_text.txt", b"a passage")
        add(archive, "./train-novels.tar", inner)
        add(archive, "./lambada-vocab-2.txt", b"word 1")
    for name, text in NOVELS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "train-novels" / "Adventure" / "._a_novel.txt").write_bytes(b"\x00\xff")
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
    ["lambada-dataset.tar.gz", "train-novels.tar", "train-novels", "plain_text"],
)
def test_each_form_holds_the_same_novels(published, name, texts_of, goes_on):
    source = lambada(published / name)
    assert texts_of(source) == TEXTS
    for span in source.spans:
        assert span.part.count() >= len(goes_on(span.part)) > 0


def test_reading_an_archive_writes_nothing_but_the_output(published, texts_of):
    before = set(published.rglob("*"))
    texts_of(lambada(published / "lambada-dataset.tar.gz"))
    after = set(published.rglob("*")) - {published / "prepared"}
    assert after == before


def test_a_cut_archive_is_named(published, texts_of):
    for name in ("lambada-dataset.tar.gz", "train-novels.tar"):
        path = published / name
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match=f"{name} is not a complete tar archive"):
            texts_of(lambada(path))


def test_a_file_too_large_for_a_novel_is_not_read(published, texts_of, monkeypatch):
    monkeypatch.setattr("fwpkm_jax.paper.data.lambada._MAX_BYTES", 69_999)
    with pytest.raises(ValueError, match=r"long\.txt holds 70,000 bytes, more than any novel"):
        texts_of(lambada(published / "train-novels.tar"))


def test_a_novel_that_is_not_utf8_is_named(published, texts_of):
    with tarfile.open(published / "x.tar", "w") as archive:
        add(archive, "train-novels/A/b.txt", b"a\n\xe9")
    with pytest.raises(ValueError, match=r"x\.tar, member train-novels/A/b\.txt is not UTF-8"):
        texts_of(lambada(published / "x.tar"))


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_what_is_missing_is_said_with_its_address(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(MISSING, match=r"zenodo\.org/records/2630551.*cimec/lambada"):
        lambada(tmp_path / name)
