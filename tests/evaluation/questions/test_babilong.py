"""BABILong: bAbI's files, facts hidden in a background, and which answers are right."""

import numpy as np
import pytest

from fwpkm_jax.data import load_tokenizer
from fwpkm_jax.evaluation.babilong.evaluate import BabilongConfig, is_right
from fwpkm_jax.evaluation.babilong.samples import Background, Story, find_task, hide, read_stories
from fwpkm_jax.evaluation.questions.asking import Question

BYTES = load_tokenizer("bytes")
LINES = (
    "1 Mary went to the bathroom.",
    "2 John moved to the hallway.",
    "3 Where is Mary? \tbathroom\t1",
    "4 Mary went to the garden.",
    "5 Where is Mary? \tgarden\t4",
    "1 Sandra took the milk.",
    "2 What has Sandra? \tmilk\t1",
)


def test_each_question_has_the_facts_before_it(tmp_path):
    file = tmp_path / "en" / "qa1_single-supporting-fact_test.txt"
    file.parent.mkdir()
    file.write_text("\n".join(LINES))
    (file.parent / "qa11_basic-coreference_test.txt").write_text("other")
    assert find_task(tmp_path, "qa1") == file
    first, second, third = read_stories(file)
    assert first == Story((LINES[0][2:], LINES[1][2:]), "Where is Mary?", "bathroom")
    assert second.facts == (*first.facts, "Mary went to the garden.")
    assert third == Story(("Sandra took the milk.",), "What has Sandra?", "milk")


def test_facts_keep_their_order_between_whole_sentences():
    sentences = [f"This is sentence {n}." for n in range(20)]
    facts = ["Fact one.", "Fact two.", "Fact three."]
    background = Background([*sentences, "x"], BYTES)
    taken = background.take(200)
    assert taken == sentences[: len(taken)]
    size = len(BYTES.encode("".join(f" {one}" for one in taken)))
    assert 200 - 22 <= size <= 200
    assert background.take(60)[0] == sentences[len(taken)]  # The next text goes on behind it.
    places = []
    for seed in range(20):
        text = hide(facts, taken, np.random.default_rng(seed))
        at = [text.index(fact) for fact in facts]
        assert at == sorted(at)
        rest = text
        for fact in facts:
            rest = rest.replace(fact, "").replace("  ", " ")
        assert rest.strip() == " ".join(taken)
        places.append(at[0])
    assert len(set(places)) > 5


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (" Mary is in the Garden. Or the kitchen", 1),
        ("garden", 1),
        ("the garden or the kitchen", 0),
        ("the kitchen", 0),
        ("", 0),
        ("It is known. garden", 0),
        ("not the office but the garden", 1),  # The question names the office.
    ],
)
def test_an_answer_is_right_if_it_names_one_label(answer, right):
    asked = "\n</context>\nQuestion: Where went Mary after the office?\nAnswer:"
    question = Question("", asked, ("garden",))
    assert is_right(question, answer, labels={"garden", "kitchen", "office"}) == right


def test_what_is_none_of_babis_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tasks: 'qa21' is none of qa1"):
        BabilongConfig(tasks=("qa21",))
    with pytest.raises(ValueError, match=r"lengths=\(-1,\) must name tasks and numbers"):
        BabilongConfig(lengths=(-1,))
    with pytest.raises(FileNotFoundError, match=r"holds no qa3_\*_test.txt; name the folder"):
        find_task(tmp_path, "qa3")
    for folder in ("en", "hn"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "qa3_x_test.txt").write_text("1 A fact.\nno number\n")
    with pytest.raises(ValueError, match="holds 2 files of qa3"):
        find_task(tmp_path, "qa3")
    file = find_task(tmp_path / "en", "qa3")
    with pytest.raises(ValueError, match=r"line 2: 'no number' is no number with a sentence"):
        read_stories(file)
    file.write_text("1 A fact.\n")
    with pytest.raises(ValueError, match="asks no question"):
        read_stories(file)
    file.write_text("1 Where?\t\t1\n")
    with pytest.raises(ValueError, match="line 1: the question has no answer"):
        read_stories(file)
    with pytest.raises(ValueError, match="the background has no sentences"):
        Background(["x"], BYTES)
