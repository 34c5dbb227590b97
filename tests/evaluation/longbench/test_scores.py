"""LongBench's scores; values of ROUGE-L are those of the package rouge 1.0.1."""

import pytest

from fwpkm_jax.evaluation.longbench import scores
from fwpkm_jax.evaluation.longbench.answers import ANSWER_TASKS, AnswersConfig, scorer
from fwpkm_jax.evaluation.questions.asking import Question


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("The Cat, sat!", "a cat sat", 1.0),
        ("cat cat dog", "cat dog dog", 2 / 3),  # 2 of 3 words in common on both sides.
        ("the cat sat on the mat", "cat", 2 * (1 / 4) / (1 + 1 / 4)),
        ("", "cat", 0.0),
        ("the", "an", 0.0),
    ],
)
def test_f1_counts_words_without_articles_case_and_punctuation(answer, reference, score):
    assert scores.word_f1(answer, reference) == pytest.approx(score)


ROUGE = [
    ("the cat sat on the mat", "the cat was on the mat", 0.7999999950000002),
    (
        "red fox. the dog ran over the hill",
        "the dog ran. a red fox sat on the hill",
        0.7499999950781251,
    ),
    ("dog cat dog", "cat dog cat", 0.999999995),
    (
        "stone red sat ran red river on fox over . ran on",
        "a river . ran and over cat a a . on over mat on hill dog ran red ran a . . a . and",
        0.39999999520000007,
    ),
    ("", "a cat", 0.0),
    (". .", "a cat", 0.0),
]


@pytest.mark.parametrize(("answer", "reference", "score"), ROUGE)
def test_rouge_l_is_that_of_its_package(answer, reference, score):
    assert scores.rouge_l(answer, reference) == pytest.approx(score, abs=1e-9)


def test_a_class_counts_if_the_answer_names_it():
    classes = ["Date", "Human", "Human group", "City"]
    assert scores.named_class("Human", "Human", classes) == 1
    assert scores.named_class("Human or City", "Human", classes) == 0.5
    assert scores.named_class("Type: Human group", "Human group", classes) == 1
    assert scores.named_class("City", "Human", classes) == 0


def test_numbers_count_by_their_share():
    assert scores.same_number("Paragraph 7", "Paragraph 7") == 1
    assert scores.same_number("7 or 8", "7") == 0.5
    assert scores.same_number("none", "7") == 0
    assert scores.same_number("17", "7") == 0


def test_code_is_compared_by_its_first_line():
    assert scores.code_similarity("\n# note\n`x`\nreturn x\nmore", "return x") == 1
    # 2 * 8 characters of "return x" in 8 + 9 characters.
    assert scores.code_similarity("return x", "return xy") == round(100 * 16 / 17) / 100
    assert scores.code_similarity("", "return") == 0


def test_an_answer_has_the_best_score_over_its_references_by_its_first_line_where_asked():
    question = Question("", "?", ("a dog", "red fox"), "x")
    assert scorer(ANSWER_TASKS["triviaqa"], {})(question, "\nred fox\nother words") == 1
    assert scorer(ANSWER_TASKS["hotpotqa"], {})(question, "red fox\nother") == pytest.approx(0.8)
    score = scorer(ANSWER_TASKS["trec"], {"x": ["red", "red fox"]})
    assert score(Question("", "?", ("red fox",), "x"), "red fox\nred") == 1


def test_tasks_that_are_not_offered_are_named():
    with pytest.raises(ValueError, match="'dureader' is Chinese, and its score needs"):
        AnswersConfig(tasks=("dureader",))
    with pytest.raises(ValueError, match=r"tasks: 'hotpot' is none of .*nearest name is hotpotqa"):
        AnswersConfig(tasks=("hotpot",))
    with pytest.raises(ValueError, match="max_tokens=1 must be at least 2"):
        AnswersConfig(max_tokens=1)
