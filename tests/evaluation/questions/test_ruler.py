"""RULER's samples: what they hold, how long they are, and how answers are scored."""

import json
import re
from collections import Counter

import pytest

from fwpkm_jax.data import load_tokenizer
from fwpkm_jax.evaluation.questions.asking import Question
from fwpkm_jax.evaluation.questions.texts import sentences_of
from fwpkm_jax.evaluation.ruler import prompts
from fwpkm_jax.evaluation.ruler.documents import read_hotpotqa, read_squad
from fwpkm_jax.evaluation.ruler.evaluate import (
    RulerConfig,
    any_reference,
    share_of_references,
)
from fwpkm_jax.evaluation.ruler.samples import Material, make_samples, words_of
from fwpkm_jax.outside_files import OutsideFileError

BYTES = load_tokenizer("bytes")
ESSAY = "A house stood by the river. Who lived there? Nobody knew it. " * 4
WORDS = [a + b for a in "bcdfgh" for b in ("all", "ent", "ind", "ock", "ust", "ame", "ide", "ore")]
LENGTH = 3000
DOCUMENTS = [f"Document of the town {n}. It has {n} towers." for n in range(30)]
SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": DOCUMENTS[10 * article + n],
                    "qas": [
                        {
                            "question": f"How many towers has the town {10 * article + n}?",
                            "answers": [{"text": f"{10 * article + n} towers"}],
                            "is_impossible": n == 3,
                        }
                    ],
                }
                for n in range(10)
            ]
        }
        for article in range(3)
    ]
}
HOTPOT = [
    {
        "question": "Which town has 4 towers?",
        "answer": "Town 4",
        "context": [[f"Town {n}", [f"It has {n} towers.", " It is old."]] for n in range(6)],
    }
]


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Material:
    folder = tmp_path_factory.mktemp("documents")
    (folder / "squad.json").write_text(json.dumps(SQUAD))
    (folder / "hotpot.json").write_text(json.dumps(HOTPOT))
    documents = {
        "qa_1": read_squad(folder / "squad.json"),
        "qa_2": read_hotpotqa(folder / "hotpot.json"),
    }
    return Material(ESSAY.split(), WORDS, documents)


def samples(task, material, *, length=LENGTH, number=2, seed=0) -> list[Question]:
    return make_samples(
        task, length=length, number=number, seed=seed, tokenizer=BYTES, material=material
    )


@pytest.mark.parametrize("task", prompts.TASKS)
def test_a_sample_holds_its_answers_and_fills_its_length(task, material):
    found = samples(task, material)
    assert found == samples(task, material)
    assert found[0].context != samples(task, material, seed=1)[0].context
    assert samples(task, material, number=1) == found[:1]  # A limit changes no sample.
    room = LENGTH - prompts.NEW_TOKENS[task]
    for one in found:
        assert all(reference in one.context for reference in one.references)
        size = len(BYTES.encode(one.context + one.question))
        assert size <= room
        if task not in ("qa_1", "qa_2"):  # The documents may be too few.
            assert size > room - 300
    if task != "qa_2":
        assert found[0].context != found[1].context


@pytest.mark.parametrize("task", prompts.NEEDLE_TASKS)
def test_needles_stand_in_the_text_as_often_as_published(task, material):
    spec = prompts.NEEDLE_TASKS[task]
    (one,) = samples(task, material, number=1)
    needles = re.findall(r"One of the special magic (\w+) for (\S+) is: (\S+)\.", one.context)
    kinds, keys, values = zip(*needles, strict=True)
    assert set(kinds) == {spec.values}
    asked = [key for key in set(keys) if re.search(rf"\b{re.escape(key)}\b", one.question)]
    assert len(asked) == spec.num_queries
    assert {v for k, v in zip(keys, values, strict=True) if k in asked} == set(one.references)
    assert len(one.references) == spec.num_queries * spec.num_values
    hidden = spec.num_keys * spec.num_values
    assert len(needles) == hidden if spec.haystack != "needle" else len(needles) > hidden + 5
    pattern = {"numbers": r"\d{7}", "uuids": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"}
    assert all(re.fullmatch(pattern[spec.values], value) for value in values)
    single = spec.num_queries * spec.num_values == 1
    assert one.question.endswith("text is" if single else "text are")
    assert one.context.startswith("A special magic" if single else "Some special magic")


def test_a_chain_of_variables_is_in_order_behind_a_solved_example(material):
    (one,) = samples("vt", material, number=1)
    example, _, text = one.context.rpartition("Memorize and track")
    assert example.count("VAR ") == text.count("VAR ") == 1 + 2 * 4
    found = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text)
    assert [name for name, _ in found] == list(one.references)
    assert [of for _, of in found][1:] == list(one.references)[:-1]
    assert f"the value {found[0][1]}, they are: " in one.question
    solved = re.findall(r"VAR (\w+) = ", example)
    assert example.rstrip().endswith(f"they are:  {' '.join(solved)}")


@pytest.mark.parametrize(("length", "often", "seldom"), [(LENGTH, 6, 1), (6000, 30, 3)])
def test_common_words_are_the_ten_most_common(material, length, often, seldom):
    (one,) = samples("cwe", material, length=length, number=1)
    text = one.context.rpartition("Below is a numbered list")[2]
    counts = Counter(re.findall(r"\d+\. (\S+)", text))
    assert {word for word, n in counts.items() if n == often} == set(one.references)
    assert len(one.references) == 10
    assert set(counts.values()) == {often, seldom}


def test_coded_words_are_as_frequent_as_their_rank_says(material):
    (one,) = samples("fwe", material, number=1)
    words = one.context.partition("Find the three most frequently appeared coded words. ")[2]
    counts = Counter(words.split()).most_common(4)
    assert [word for word, _ in counts] == ["...", *one.references]
    most = counts[0][1]
    assert [n for _, n in counts] == pytest.approx([most / k**2 for k in (1, 2, 3, 4)], abs=1)


def test_questions_come_with_their_own_documents_and_those_of_the_same_article(material):
    found = samples("qa_1", material, length=800, number=40)
    assert len(found) == 27  # Those with an answer.
    for number, one in enumerate(found):
        article = number // 9
        towns = [int(n) for n in re.findall(r"the town (\d+)\.", one.context)]
        assert one.references[0].split()[0] in map(str, towns)
        assert all(town // 10 == article for town in towns)
    (hotpot,) = samples("qa_2", material)
    assert "Document 1:\nTown" in hotpot.context
    assert hotpot.references == ("Town 4",)


def test_an_answer_scores_the_share_of_references_that_it_names():
    question = Question("", "?", ("Blue", "red", "3"))
    assert share_of_references(question, "blue and RED") == pytest.approx(2 / 3)
    assert any_reference(question, "It is red.") == 1
    assert any_reference(question, "green") == share_of_references(question, "") == 0


def test_text_is_cut_into_sentences_and_words():
    assert sentences_of("One. Two? Three!  Four") == ["One.", "Two?", "Three!", "Four"]
    assert words_of("The cat and the Dog, a catalogue. incomprehensibility") == [
        *("and", "cat", "catalogue", "the")
    ]


def test_what_cannot_be_made_is_refused(material, tmp_path):
    with pytest.raises(ValueError, match=r"length=200 is too short for niah_single_1: .*lengths"):
        samples("niah_single_1", material, length=200)
    with pytest.raises(ValueError, match=r"tasks: 'nihah' is none of .*"):
        RulerConfig(tasks=("nihah",))
    with pytest.raises(ValueError, match=r"qa_1 needs data; name squad, as --ruler\.squad PATH"):
        RulerConfig(tasks=("qa_1",))
    with pytest.raises(ValueError, match=r"tasks=\('vt', 'vt'\) names one twice"):
        RulerConfig(tasks=("vt", "vt"))
    assert RulerConfig(hotpotqa="x.json").chosen_tasks[-1] == "qa_2"
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"data": [{"title": "no paragraphs"}]}))
    with pytest.raises(OutsideFileError, match=r"is not a file of SQuAD 2 \(KeyError"):
        read_squad(file)
    with pytest.raises(OutsideFileError, match=r"other\.json"):
        read_hotpotqa(file)
    file.write_text('{"data": []}')
    with pytest.raises(OutsideFileError, match="holds no question"):
        read_squad(file)
