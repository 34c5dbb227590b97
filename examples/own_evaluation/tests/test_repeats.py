"""The measure, the evaluation of a run from the command line, and the report."""

import json

import numpy as np
import pytest
from own_evaluation import REPEATS, RepeatsConfig
from own_evaluation.repeats import repeated

from fwpkm_jax.cli import main
from fwpkm_jax.evaluation import EVALS, PerplexityConfig
from fwpkm_jax.evaluation.sources import text_sources
from fwpkm_jax.run.evaluate import subject_of
from fwpkm_jax.run.load import load_run


def test_a_phrase_is_repeated_if_it_stood_in_the_text_before():
    text = np.frombuffer(b"abcxabcyab", np.uint8)
    assert repeated(text, 2).tolist() == [False] * 5 + [True] + [False] * 3
    assert repeated(text, 0).tolist() == [False] * 3 + [True] * 3 + [False, True, True]


def test_both_kinds_together_are_what_perplexity_scores(run):
    subject = subject_of(load_run(run), name="tiny")
    result = REPEATS.run(subject, RepeatsConfig(context=2))
    sources = text_sources(subject.text)
    whole = EVALS["ppl"].of_model(
        subject.model,
        subject.memory,
        config=PerplexityConfig(segment_length=subject.text.length),
        sources=sources,
    )
    for name in ("writing", "frozen"):
        ours, theirs = (one.arrays[f"loss_{name}"] for one in (result, whole))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    numbers = result.record["results"]
    tokens = numbers["tokens"]
    mean = sum(tokens[kind] * numbers["writing"][kind] for kind in tokens) / sum(tokens.values())
    assert mean == pytest.approx(whole.record["results"]["writing"]["all"]["loss"], rel=1e-6)
    assert tokens["repeated"] > tokens["new"]  # The text says its sentence three times.
    assert result.record["provenance"]["data_files"] == sources[0].files
    assert result.record["provenance"]["tokenizer"] == "bytes"


def test_the_command_knows_it_and_the_report_shows_it(run, capsys):
    options = ["--suite", "repeats", "--repeats.context", "1"]
    assert main(["eval", str(run), "--plugins", "own_evaluation", *options]) == 0
    assert "loss, writing" in capsys.readouterr().out
    record = json.loads((run / "results" / "repeats.json").read_text())
    assert record["config"]["context"] == 1
    assert REPEATS.title in (run / "results" / "report.html").read_text()
    assert main(["report", str(run)]) == 0


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="context=-1 is too small; use 0"):
        RepeatsConfig(context=-1)
