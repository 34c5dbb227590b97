import json
import zipfile

import pytest

from fwpkm_jax.data.longbench import TASKS, read_samples
from fwpkm_jax.data.tokenizers import load_tokenizer

RECORD = {
    "input": "Who {}?",
    "context": "A long tale. </s>\n",
    "answers": ["Bo", "Bo the cat"],
    "length": 4,
    "dataset": "narrativeqa",
    "language": "en",
    "all_classes": None,
    "_id": "n0",
}


def write_task(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({**RECORD, **record}) + "\n" for record in records))
    return path


def only_sample(path, task):
    ((number, sample),) = read_samples(path, task)
    assert number == 1
    return sample


def test_the_blocks_are_the_published_prompts(tmp_path):
    # Protocol of the paper, written out here once more.
    only_answer = "Only give me the answer and do not output any other words.\n"
    ending = "Question:\nWho {}?\nAnswer:\n"
    passages = "Answer the question based on the given passages. " + only_answer
    given = "Answer the question based on the given context. " + only_answer
    expected = {
        "narrativeqa": (
            "You are given a story, which can be either a novel or a movie script, and a "
            "question.\nAnswer the question as concisely as you can, using a single phrase if "
            "possible. Do not provide any  explanation.\nStory:\n{context}\n",
            "Now, answer the question based on the story as concisely as you can, using a single "
            "phrase if possible. Do not provide any explanation.\n",
        ),
        "multifieldqa_en": (
            "Read the following text and answer briefly.\n{context}\n",
            "Now, answer the following question based on the above text, only give me the answer "
            "and do not output any other words.\n",
        ),
        "hotpotqa": (passages + "The following are given passages.\n{context}\n", passages),
        "2wikimqa": (passages + "The following are given passages.\n{context}\n", passages),
        "musique": (given + "Context:\n{context}\n", given),
    }
    assert set(expected) == set(TASKS)
    for task, (context, question) in expected.items():
        write_task(tmp_path / f"{task}.jsonl", {})
        sample = only_sample(tmp_path, task)
        assert sample.context == context.format(context=RECORD["context"])
        assert sample.question == question + ending
        assert sample.answers == ("Bo", "Bo the cat")
        assert sample.id == "n0"


def test_archive_folder_and_file_hold_the_same_samples(tmp_path):
    file = write_task(tmp_path / "data" / "musique.jsonl", {}, {"_id": None, "input": "Why?"})
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as content:
        content.writestr("../data/musique.jsonl", "not this one")
        content.write(file, "data/musique.jsonl")
    expected = list(read_samples(file, "musique"))
    assert [sample.id for _, sample in expected] == ["n0", "musique:2"]
    for path in (tmp_path, tmp_path / "data", archive):
        assert list(read_samples(path, "musique")) == expected


@pytest.mark.parametrize("field", [{"language": "zh"}, {"length": 65_537}])
def test_samples_that_do_not_count_keep_their_line(tmp_path, field):
    file = write_task(tmp_path / "musique.jsonl", {"length": 65_536}, field, {})
    assert [(n, s is None) for n, s in read_samples(file, "musique")] == [
        (1, False),
        (2, True),
        (3, False),
    ]


def test_tokens_are_those_of_both_blocks_and_the_longest_answer(tmp_path):
    sample = only_sample(write_task(tmp_path / "musique.jsonl", {}), "musique")
    expected = len(sample.context) + len(sample.question) + len("Bo the cat")
    assert sample.num_tokens(load_tokenizer("bytes")) == expected


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"answers": []}, r"line 1: field 'answers' is \[\], not a list of texts"),
        ({"answers": ["a", 5]}, "line 1, answers: field '1' is a int"),
        ({"context": None}, "line 1: field 'context' is a NoneType"),
        ({"length": "4"}, "line 1: field 'length' is '4', not a number of words"),
    ],
)
def test_a_record_that_is_no_sample_is_named(tmp_path, record, message):
    file = write_task(tmp_path / "musique.jsonl", record)
    with pytest.raises(ValueError, match=message):
        only_sample(file, "musique")


def test_what_holds_no_task_is_named(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"0")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as content:
        content.writestr("data/musique.jsonl", "")
    for path, task, error, message in [
        (tmp_path / "no.zip", "musique", FileNotFoundError, "There is no .*no.zip"),
        (tmp_path, "musique", FileNotFoundError, "holds no musique.jsonl"),
        (tmp_path / "data.zip", "hotpotqa", FileNotFoundError, "holds no data/hotpotqa.jsonl"),
        (tmp_path / "x.bin", "musique", ValueError, "neither a .jsonl file nor a zip archive"),
        (tmp_path, "qasper", ValueError, "task='qasper' is not one of narrativeqa"),
    ]:
        with pytest.raises(error, match=message):
            list(read_samples(path, task))
