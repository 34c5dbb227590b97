"""Evaluations of other packages: what is registered, refused, and shown without its package."""

import dataclasses
import json
from dataclasses import dataclass

import numpy as np
import pytest

from fwpkm_jax.cli.eval_command import EvalOptions, parse
from fwpkm_jax.data import TextData
from fwpkm_jax.evaluation import (
    EVALS,
    Evaluation,
    Outcome,
    Subject,
    choose_suite,
    register_evaluation,
)
from fwpkm_jax.evaluation.registry import OPTIONS_OF_ALL
from fwpkm_jax.evaluation.report import page


@dataclass(frozen=True)
class Options:
    """Counts."""

    most: int = 3
    """The largest number."""


def count(subject, options) -> Outcome:
    return Outcome(numbers={"most": options.most}, scored_tokens=options.most)


def counting(**changes) -> Evaluation:
    return Evaluation(
        **{"name": "counting", "config": Options, "evaluate": count, "limit": "most"}
        | {"title": "Counting", "about": "It counts. So it does.", "table": str}
        | changes
    )


@pytest.fixture
def registered():
    before = dict(EVALS)
    register_evaluation(counting())
    yield EVALS["counting"]
    EVALS.clear()
    EVALS.update(before)


def test_a_registered_evaluation_has_options_of_its_own_on_the_command_line(registered):
    options = parse(["run", "--suite", "counting", "--counting.most", "5"])
    assert options.counting == Options(most=5)
    register_evaluation(counting(title="Counting again"))  # As where a module is loaded twice.
    assert EVALS["counting"].title == "Counting again"


def test_numbers_of_numpy_are_numbers_in_the_record(registered, model, memory):
    def evaluate(subject, options):
        numbers = {"loss": np.float32(0.5), "counts": np.arange(2), "best": np.int32(3)}
        return Outcome(numbers=numbers, scored_tokens=2)

    subject = Subject(model=model, memory=memory)
    result = counting(evaluate=evaluate).run(subject, Options())
    assert result.record["results"] == {"loss": 0.5, "counts": [0, 1], "best": 3}
    assert result.record["provenance"]["chunk_size"] == 8
    nan = counting(evaluate=lambda s, o: Outcome(numbers={"x": np.float32("nan")}, scored_tokens=1))
    with pytest.raises(ValueError, match="counting: a number of its results is not finite"):
        nan.run(subject, Options())
    with pytest.raises(TypeError, match="counting: evaluate gave dict, no Outcome"):
        counting(evaluate=lambda s, o: {}).run(subject, Options())


def test_it_does_not_run_unless_asked_for(registered, model, memory, tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    data = TextData(train_paths=("none",), valid_paths=(str(tmp_path / "text.txt"),))
    subject = Subject(model=model, memory=memory, data=data)
    assert choose_suite((), subject) == ("ppl",)
    assert choose_suite(("counting",), subject) == ("counting",)
    assert "counting" in choose_suite(("all",), subject)
    with pytest.raises(ValueError, match=r"nearest name is counting\. .*--plugins PACKAGE"):
        choose_suite(("countin",), subject)


def test_names_with_a_meaning_of_their_own_are_those_of_the_command():
    fields = {field.name for field in dataclasses.fields(EvalOptions)}
    assert set(OPTIONS_OF_ALL) == fields | {"all"}


@dataclass(frozen=True)
class Open:
    """An option without a default."""

    most: int


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "two words"}, "'two words' must be an identifier"),
        ({"name": "step"}, "'step' is an option of fwpkm eval"),
        ({"name": "ppl"}, r"'ppl' is taken by fwpkm_jax\.evaluation\.perplexity\.evaluate"),
        ({"config": int}, "config=<class 'int'> of 'counting' is no dataclass"),
        ({"config": Open}, "the option 'most' of 'counting' has no default"),
        ({"limit": "least"}, "limit='least' of 'counting' is none of its options most"),
    ],
)
def test_what_the_command_could_not_use_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        register_evaluation(counting(**changes))


def test_a_report_shows_the_single_numbers_of_an_evaluation_that_it_does_not_know(tmp_path):
    record = {
        "evaluation": "<mine>",
        "provenance": {"seed": 7},
        "config": {},
        "results": {"loss": {"new": 1.5}, "curve": [1, 2]},
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(record))
    assert page._record(path) == record
    shown = page._result(path, record, tmp_path)
    assert "&lt;mine&gt;" in shown
    assert "--plugins PACKAGE" in shown
    assert "<td>loss.new</td><td>1.5</td>" in shown
    assert "curve" not in shown
    path.write_text(json.dumps({"evaluation": "mine", "results": [1]}))
    assert page._record(path) is None
