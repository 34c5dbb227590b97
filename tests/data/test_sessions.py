"""Sessions: files of rows that are read one after the other, as training rows."""

import json

import numpy as np
import pytest

from fwpkm_jax.data.sessions import SessionRows
from fwpkm_jax.data.text import TextData
from fwpkm_jax.data.tokenizers import load_tokenizer
from fwpkm_jax.io.untrusted import OutsideFileError
from tests.data.chat_tokenizer import save_tokenizer

TOLD = "Bo sat on the mat. Al sat on the hat."
SESSION = {
    "rows": [
        {"text": TOLD},
        {
            "questions": [
                {"question": "Where did Bo sit?", "answer": " mat", "about": "Bo sat on the"},
                {"question": "And Al?", "answer": " hat"},
            ]
        },
    ]
}


def source(folder, *sessions, tokenizer="bytes", length=160, **options):
    path = folder / "sessions.jsonl"
    path.write_text("".join(json.dumps(session) + "\n" for session in sessions))
    data = TextData(
        train_paths=(str(path),),
        tokenizer=tokenizer,
        length=length,
        sessions=SessionRows(**options),
    )
    return data.source(split="train", seed=0)


def test_a_row_holds_a_session_whose_rows_do_not_see_each_other(tmp_path):
    row = source(tmp_path, SESSION, multiple=64)[0]
    tokens, segments, weights = row["tokens"], row["segment_ids"], row["loss_weight"]
    text = load_tokenizer("bytes").decode
    asked = "Where did Bo sit? mat.\nAnd Al? hat.\n"
    assert text(tokens[: len(TOLD)]) == TOLD
    assert text(tokens[64 : 64 + len(asked)]) == asked
    expected = np.zeros(160, int)
    expected[: len(TOLD)], expected[64 : 64 + len(asked)] = 1, 2
    np.testing.assert_array_equal(segments, expected)
    # Labels: the answers and what ends each count in full, the first token of a row and padding not
    # at all.
    answers = np.flatnonzero(weights == 1)
    assert text(tokens[answers + 1]) == " mat. hat."
    inside = np.flatnonzero(weights == np.float32(0.1))
    assert len(inside) == len(TOLD) - 1 + len(asked) - 1 - len(answers)
    assert np.count_nonzero(weights) == len(answers) + len(inside)


def test_an_answer_knows_where_it_was_told(tmp_path):
    row = source(tmp_path, SESSION, multiple=64)[0]
    labels = row["tokens"][1:]
    places = np.flatnonzero(row["answer_distance"])
    assert len(places) == len(" mat hat")
    back = places - row["answer_distance"][places]
    np.testing.assert_array_equal(labels[back], labels[places])
    assert back[0] == TOLD.index(" mat") - 1
    assert back[-1] == TOLD.index(" hat") + len(" hat") - 2


def test_of_two_tellings_the_last_one_counts_unless_the_file_says_which(tmp_path):
    told = "It is red. No, it is red."
    ask = {"question": "Which?", "answer": " red"}
    rows = [{"text": told}, {"questions": [ask, {**ask, "about": "It is"}]}]
    row = source(tmp_path, {"rows": rows})[0]
    places = np.flatnonzero(row["answer_distance"])
    back = places - row["answer_distance"][places]
    assert [back[0] + 1, back[4] + 1] == [told.rindex(" red"), told.index(" red")]


def test_what_the_assistant_says_is_an_answer(tmp_path):
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    path = str(save_tokenizer(tmp_path))
    talk = [
        {"role": "user", "content": "the bat?"},
        {"role": "assistant", "content": " the hat"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": " the cat"},
    ]
    rows = [{"text": "a bat and the hat and the cat"}, {"messages": talk}]
    row = source(tmp_path, {"rows": rows}, tokenizer=path, length=200)[0]
    tokenizer = load_tokenizer(path)
    labels = row["tokens"][1:]
    places = np.flatnonzero(row["answer_distance"])
    assert tokenizer.decode(labels[places]) == " the hat the cat"
    counted = np.flatnonzero(row["loss_weight"] == 1)
    np.testing.assert_array_equal(counted, np.union1d(places, places[[1, 3]] + 1))
    ends = np.setdiff1d(counted, places)
    np.testing.assert_array_equal(labels[ends], tokenizer.encode_written("<|end|>").repeat(2))
    back = places - row["answer_distance"][places]
    np.testing.assert_array_equal(labels[back], labels[places])
    written = tokenizer.encode_written(tokenizer.write_chat(talk, for_answer=False))
    second = row["segment_ids"] == 2
    assert tokenizer.decode(row["tokens"][:-1][second]) == tokenizer.decode(written)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({}, "line 1: has no list 'rows'"),
        ({"rows": []}, "line 1: has no rows"),
        ({"rows": ["x"]}, "row 1: is no object"),
        ({"rows": [{"text": 3}]}, "row 1: has no text 'text'"),
        ({"rows": [{"text": ""}]}, "row 1: is empty"),
        ({"rows": [{"questions": [{"question": "x"}]}]}, "has no text 'answer'"),
        ({"rows": [{"messages": []}]}, "the tokenizer no chat template"),
    ],
)
def test_what_is_no_session_is_named_with_its_line(tmp_path, record, problem):
    with pytest.raises(OutsideFileError) as error:
        source(tmp_path, record)
    assert all(word in str(error.value) for word in problem.split(": "))


def test_a_session_that_is_too_long_says_what_it_needs(tmp_path):
    with pytest.raises(ValueError, match=r"needs length=99.*length is 80"):
        source(tmp_path, SESSION, length=80)


def test_sessions_are_not_streamed():
    with pytest.raises(ValueError, match="sessions are read into memory"):
        TextData(train_paths=("x.jsonl",), reading="stream", sessions=SessionRows())
