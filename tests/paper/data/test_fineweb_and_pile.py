import sys

import pyarrow
import pyarrow.parquet
import pytest

from fwpkm_jax.data import load_tokenizer
from fwpkm_jax.data.json_lines import START
from fwpkm_jax.paper.data.fineweb_edu import fineweb_edu
from fwpkm_jax.paper.data.parquet import parquet_parts
from fwpkm_jax.paper.data.pile import DOMAINS, file_name, pile_domain

MISSING = (FileNotFoundError, ValueError)


def write_fineweb(folder, **files):
    """Files of the sample's schema, in groups of three rows."""
    folder.mkdir(exist_ok=True)
    for name, texts in files.items():
        numbers = range(len(texts))
        table = pyarrow.table(
            {
                "text": texts,
                "id": [f"<urn:uuid:{n}>" for n in numbers],
                "dump": ["CC-MAIN-2013-20"] * len(texts),
                "url": ["http://example.org"] * len(texts),
                "file_path": ["s3://x"] * len(texts),
                "language": ["en"] * len(texts),
                "language_score": [0.9] * len(texts),
                "token_count": pyarrow.array(numbers, pyarrow.int64()),
                "score": [2.5] * len(texts),
                "int_score": pyarrow.array([3] * len(texts), pyarrow.int64()),
            }
        )
        path = folder / f"{name[1:]}_00000.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=3)
    return folder


def numbered(prefix, count):
    return [f"{prefix}{number}" for number in range(count)]


@pytest.fixture
def sample(tmp_path):
    """20 documents in three of fourteen files, the last among them."""
    return write_fineweb(
        tmp_path / "10BT", _000=numbered("a", 7), _001=numbered("b", 5), _013=numbered("z", 8)
    )


SMALL = {"train_documents": 11, "held_out_documents": 6, "evaluation_documents": 2}


def test_the_splits_are_the_first_documents_and_two_cuts_of_the_last(sample, texts_of):
    everything = numbered("a", 7) + numbered("b", 5) + numbered("z", 8)
    assert texts_of(fineweb_edu(sample, split="valid", **SMALL)) == everything[14:16]
    assert texts_of(fineweb_edu(sample, split="test", **SMALL)) == everything[18:]
    (sample / "013_00000.parquet").unlink()
    assert texts_of(fineweb_edu(sample, split="train", **SMALL)) == everything[:11]
    many = {**SMALL, "train_documents": 100}
    assert texts_of(fineweb_edu(sample, split="train", **many)) == everything[:12]


def test_training_text_never_reaches_what_is_held_out(sample, texts_of):
    (sample / "013_00000.parquet").rename(sample / "002_00000.parquet")
    for number in range(3, 14):
        write_fineweb(sample, **{f"_{number:03}": numbered(f"{number}-", 1)})
    documents = texts_of(fineweb_edu(sample, split="train", **{**SMALL, "train_documents": 100}))
    assert len(documents) == 20 + 11 - 6
    assert documents[-1] == "7-0"


def test_every_document_can_be_gone_on_from(sample, goes_on):
    for part in parquet_parts(sample, wanted=""):
        assert [piece.place.record for piece in goes_on(part)] == list(range(part.count()))


def test_blank_documents_are_passed_over(tmp_path, texts_of):
    folder = write_fineweb(tmp_path, _000=["a", "", None, "b"])
    assert texts_of(fineweb_edu(folder, split="train")) == ["a", "b"]


@pytest.mark.parametrize(
    ("remove", "split", "message"),
    [
        ("013", "valid", r"lacks 013_00000\.parquet, the end of the sample.*sample/10BT"),
        ("000", "train", r"holds the files number \[1, 13\].*sample/10BT"),
        ("001", "train", r"holds the files number \[0, 13\]"),
    ],
)
def test_a_split_without_its_files_is_refused(sample, remove, split, message):
    (sample / f"{remove}_00000.parquet").unlink()
    with pytest.raises(ValueError, match=message):
        fineweb_edu(sample, split=split, **SMALL)


def test_too_few_documents_are_refused(sample):
    with pytest.raises(ValueError, match="holds 20 documents, fewer than the 100000"):
        fineweb_edu(sample, split="valid")


def test_files_of_other_names_are_refused(sample):
    (sample / "000_00000.parquet").rename(sample / "train.parquet")
    with pytest.raises(ValueError, match=r"train\.parquet is not named as the sample's files"):
        fineweb_edu(sample, split="valid", **SMALL)


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


def test_a_file_of_another_data_set_is_named(sample, texts_of):
    with pytest.raises(ValueError, match=r"000_00000\.parquet has no column 'meta\.pile_set_name'"):
        texts_of(pile_domain(sample, "FreeLaw"))


def test_a_cut_file_is_named(sample):
    path = sample / "000_00000.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"000_00000\.parquet is damaged"):
        fineweb_edu(sample, split="test", **SMALL)


@pytest.mark.parametrize("name", ["nothing", "empty", "x.csv"])
def test_what_is_missing_is_said_with_its_address(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.csv").write_text("a")
    with pytest.raises(MISSING, match=r"14 files .*HuggingFaceFW/fineweb-edu"):
        fineweb_edu(tmp_path / name, split="train")
    with pytest.raises(MISSING, match="monology/pile-uncopyrighted-parquet"):
        pile_domain(tmp_path / name, "FreeLaw")


def test_without_its_package_the_extra_is_named(pile, monkeypatch, texts_of):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[data\]'"):
        texts_of(pile_domain(pile, "FreeLaw"))
