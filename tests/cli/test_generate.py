import dataclasses
import io
import sys

import numpy as np
import pytest

from fwpkm_jax.cli import conversation_options, main
from fwpkm_jax.data import RecallData
from fwpkm_jax.io import status_line
from fwpkm_jax.io.terminal import visible
from fwpkm_jax.run import conversation, evaluate
from fwpkm_jax.run.continue_text import answered, continue_text
from fwpkm_jax.run.conversation import Conversation
from fwpkm_jax.run.load import IMPORTED

RECALL = RecallData(
    length=24, num_facts=2, num_keys=4, num_values=4, num_filler=4, min_distance=8, num_valid=8
)


@pytest.fixture
def program(text_run, monkeypatch, capsys):
    """Runs the program on an untrained run on text; returns exit code and output."""

    def run(*arguments, data=None, step=0):
        experiment = text_run.experiment
        experiment = experiment if data is None else dataclasses.replace(experiment, data=data)
        loaded = text_run._replace(experiment=experiment, step=step)
        monkeypatch.setattr(conversation_options, "load_run", lambda directory, step, **_: loaded)
        code = main(["generate", "somewhere", *arguments])
        shown = capsys.readouterr()
        return code, shown.err if code else shown.out

    return run


@pytest.mark.slow
def test_a_prompt_is_continued_as_the_seed_says(program):
    options = ("--prompt=Bytes are", "--max-new-tokens=6", "--sampling.temperature=1.0")
    first, again, other = (program(*options, f"--seed={seed}") for seed in (3, 3, 4))
    assert first == again != other
    code, text = first
    assert code == 0
    assert text.startswith("Bytes are")
    assert len(text.rstrip("\n")) > len("Bytes are")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", ""), "Sequence 0 has no token to continue from"),
        (("--sampling.top_k", "3"), "have no effect at temperature=0"),
        (("--memories", "x"), "memories='x' has no effect without --memory NAME"),
        (("--read", "nowhere.txt"), "nowhere.txt cannot be read: No such file"),
        (("--promt", "A"), "Perhaps you meant:"),
        (("--seed", "4294967296"), "seed=4294967296 must lie between 0 and 2147483647."),
        (("--seed=-1",), "seed=-1 must lie between 0 and 2147483647."),
        ((f"--seed={2**64}",), f"seed={2**64} must lie between 0 and 2147483647."),
    ],
)
def test_the_program_says_what_is_wrong_and_exits_with_2(program, arguments, message):
    code, shown = program(*arguments)
    assert code == 2
    assert message in " ".join(shown.split())


def test_a_conversation_takes_no_seed_that_would_be_cut(text_run):
    for seed in (-1, 2**31, 2**32, 2**64):
        with pytest.raises(ValueError, match=f"seed={seed} must lie between 0 and 2147483647"):
            Conversation(text_run, seed=seed)
        with pytest.raises(ValueError, match=f"seed={seed} must lie"):
            continue_text(text_run, "a", seed=seed)


@pytest.mark.slow
def test_how_far_a_long_text_is_read_is_shown_to_a_terminal(
    program, text_run, tmp_path, monkeypatch, capsys
):
    """The text is read in parts, with the same result as at once."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(status_line, "_SECONDS", -1.0)
    text = "".join(np.random.default_rng(0).choice(list("abcdefgh "), 2500))
    (tmp_path / "long.txt").write_text(text)
    shown = []
    monkeypatch.setattr(status_line.StatusLine, "show", lambda self, line: shown.append(line))
    code, out = program("--read", str(tmp_path / "long.txt"), "--max_new_tokens=8", "--prompt=a")
    assert code == 0
    assert [line.partition("  ETA ")[0] for line in shown] == ["parts of 1,024 tokens read: 1/2"]

    def answer_at_once():
        with Conversation(text_run) as talk:
            return answered(talk, "a", max_new_tokens=8, read=text)

    monkeypatch.setattr(conversation, "_SHOWN", 2**20)
    assert out.rstrip("\n") == visible(answer_at_once()).rstrip("\n")


@pytest.mark.thorough
def test_characters_that_the_terminal_lacks_are_printed_as_escapes(program, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    program("--prompt=Don\u2019t ", "--max_new_tokens=1")
    sys.stdout.flush()
    assert written.getvalue().startswith(b"Don\\u2019t ")


def test_what_is_read_is_written_before_the_prompt(text_run):
    talk, other = Conversation(text_run), Conversation(text_run)
    text = answered(talk, "Bob", max_new_tokens=4, read="A cat eats.")
    other.read(other.tokenizer.encode("A cat eats."))
    (answer,) = other.answer(other.tokenizer.encode("Bob"), max_new_tokens=4)
    assert text == "Bob" + other.tokenizer.decode(answer)
    np.testing.assert_array_equal(talk.state.logits, other.state.logits)
    assert talk.tokens_read == 18


def test_a_run_on_generated_tokens_has_no_text(program):
    code, shown = program("--prompt=A", data=RECALL, step=3)
    assert code == 2
    assert "trained on RecallData, whose tokens are no text; choose a run on text, such as" in shown
    code, shown = program("--prompt=A", data=RECALL)
    assert code == 2
    assert shown == (
        "fwpkm generate: The run was imported with RecallData, whose tokens are no text. If its "
        "model knows text, add tokenizer.json to the folder that the run was imported from, and "
        "import it again.\n"
    )


def test_a_model_without_its_tokenizer_is_not_evaluated(text_run, monkeypatch, capsys, tmp_path):
    """Imported from a folder without one, it reads generated facts, which it never learnt."""
    (tmp_path / IMPORTED).mkdir()
    experiment = dataclasses.replace(text_run.experiment, data=RECALL)
    loaded = text_run._replace(experiment=experiment)
    monkeypatch.setattr(evaluate, "load_run", lambda directory, step, **_: loaded)
    assert main(["eval", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"fwpkm eval: {tmp_path} has no tokenizer.json, and its model was never trained on "
        "RecallData; add tokenizer.json to the folder that the run was imported from, and import "
        "it again.\n"
    )
