import sys

import pyarrow
import pyarrow.parquet
import pytest

from fwpkm_jax.data import load_tokenizer
from fwpkm_jax.data.json_lines import START
from fwpkm_jax.paper.data.pile import DOMAINS, file_name, pile_domain

MISSING = (FileNotFoundError, ValueError)


def write_pile(folder, **files):
    """Files of the Pile's schema, in groups of three rows; a row is (domain, text)."""
    folder.mkdir(exist_ok=True)
    for name, rows in files.items():
        table = pyarrow.table(
            {
                "text": [text for _, text in rows],
                "meta": [domain and {"pile_set_name": domain} for domain, _ in rows],
            }
        )
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=3)
    return folder


@pytest.fixture
def pile(tmp_path):
    other, law, irc = "Pile-CC", "FreeLaw", "Ubuntu IRC"
    rows = [(other, "o"), (law, "l0"), (irc, "i0"), *[(None, "o")] * 4, (law, "l1"), (law, "l2")]
    return write_pile(tmp_path / "pile", a=rows, b=[(irc, "i1"), (law, "l3")])


def test_a_domain_is_what_its_name_says_in_order(pile, texts_of):
    assert texts_of(pile_domain(pile, "FreeLaw")) == ["l0", "l1", "l2", "l3"]
    assert texts_of(pile_domain(pile, "Ubuntu IRC")) == ["i0", "i1"]
    assert texts_of(pile_domain(pile, "FreeLaw"), max_characters=3) == ["l0", "l1"]


def test_every_document_of_a_domain_can_be_gone_on_from(pile, goes_on):
    part = pile_domain(pile, "FreeLaw").spans[0].part
    assert [piece.place.record for piece in goes_on(part)] == [1, 7, 8]


def test_groups_without_the_domain_are_not_read(pile, monkeypatch):
    part = pile_domain(pile, "FreeLaw").spans[0].part
    read = []
    iterate = pyarrow.parquet.ParquetFile.iter_batches
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile,
        "iter_batches",
        lambda file, *a, row_groups, **k: (
            read.extend(row_groups) or iterate(file, *a, row_groups=row_groups, **k)
        ),
    )
    assert len(list(part.read(load_tokenizer("bytes"), START))) == 3
    assert read == [0, 2]


def test_the_six_domains_have_six_files():
    assert [file_name(domain) for domain in DOMAINS] == [
        "dm_mathematics.bin",
        "freelaw.bin",
        "philpapers.bin",
        "pubmed_central.bin",
        "ubuntu_irc.bin",
        "uspto_backgrounds.bin",
    ]


def test_an_unknown_domain_is_named(pile):
    with pytest.raises(ValueError, match="domain='GitHub' is not one of DM Mathematics"):
        pile_domain(pile, "GitHub")


def test_a_file_of_another_data_set_is_named(tmp_path, texts_of):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'meta\.pile_set_name'"):
        texts_of(pile_domain(tmp_path, "FreeLaw"))


def test_a_cut_file_is_named(pile, texts_of):
    path = pile / "a.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a\.parquet is damaged"):
        texts_of(pile_domain(pile, "FreeLaw"))


@pytest.mark.parametrize("name", ["nothing", "empty", "x.csv"])
def test_what_is_missing_is_said_with_its_address(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.csv").write_text("a")
    with pytest.raises(MISSING, match="monology/pile-uncopyrighted-parquet"):
        pile_domain(tmp_path / name, "FreeLaw")


def test_without_its_package_the_extra_is_named(pile, monkeypatch, texts_of):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[data\]'"):
        texts_of(pile_domain(pile, "FreeLaw"))
