"""A chat through a pipe: what it answers, keeps, forgets and says."""

import dataclasses
import io
import os
import re
import signal

import jax
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax import memories
from fwpkm_jax.cli import conversation_options, main
from fwpkm_jax.generation import Sampling, generate, init_generation
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.run import chat as chat_module
from fwpkm_jax.run.conversation import Conversation
from tests.cli.conftest import MODEL


@pytest.fixture
def programs(text_run, monkeypatch, capsys, tmp_path):
    """Runs `chat` and `generate` on an untrained run on text."""

    def run(command, *arguments, lines="", run=text_run):
        monkeypatch.setattr(conversation_options, "load_run", lambda directory, step, **_: run)
        monkeypatch.setattr(
            "sys.stdin", lines if hasattr(lines, "readline") else io.StringIO(lines)
        )
        code = main([command, str(tmp_path), "--max_new_tokens=8", "--memory=alice", *arguments])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


@pytest.mark.slow
def test_a_question_aside_changes_neither_the_conversation_nor_its_memory(text_run):
    talk = Conversation(text_run)
    talk.read(np.arange(65, 83))
    before = jax.device_get((talk.state.stream.memory, talk.state.logits))
    aside = talk.answer_aside(np.asarray([65, 66]), max_new_tokens=4)
    assert talk.tokens_read == 18
    after = jax.device_get((talk.state.stream.memory, talk.state.logits))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    (answer,) = talk.answer(np.asarray([65, 66]), max_new_tokens=4)
    assert answer.tolist() == aside.tolist(), "no chunk was full, so both read the same memory"


@pytest.mark.slow
def test_what_waits_is_written_before_a_question_is_read(text_run):
    told, question = np.arange(65, 70), np.asarray([65, 66])
    model = text_run.model
    first = jax.tree.map(lambda x: x[:1], text_run.memory)
    state = init_generation(model, first, batch=1, max_length=64)
    state = generate(model, [told], state, max_new_tokens=0).state
    written = state._replace(stream=model.flush(state.stream))
    talk = Conversation(text_run)
    known = Sampling(vocab_size=talk.tokenizer.vocab_size)
    expected = generate(
        *(model, [question], written), max_new_tokens=4, sampling=known, keep_state=True
    )
    list(talk.answer(told, max_new_tokens=0))
    assert talk._waiting() == {"layer_0": 4}  # Of 5 tokens the last one has no target yet.
    before = jax.device_get(talk.state.stream.memory)
    assert talk.answer_aside(question, max_new_tokens=4).tolist() == expected.tokens[0].tolist()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(talk.state.stream.memory), before)
    (answer,) = talk.answer(question, max_new_tokens=4)
    assert answer.tolist() == expected.tokens[0].tolist()
    np.testing.assert_allclose(talk.state.logits, expected.state.logits, rtol=1e-5, atol=1e-6)
    now = jax.device_get(talk.state.stream.memory)
    jax.tree.map(np.testing.assert_allclose, now, jax.device_get(written.stream.memory))
    assert any((x != y).any() for x, y in zip(*map(jax.tree.leaves, (now, before)), strict=True))


@pytest.mark.slow_cases("True")
@pytest.mark.thorough
@pytest.mark.parametrize("write", [True, False])
def test_what_is_read_is_written_at_once_and_never_without_writing(text_run, write):
    talk = Conversation(text_run, write=write)
    before = jax.device_get(talk.state.stream.memory)
    talk.read(np.arange(65, 70))
    assert talk._waiting() == {"layer_0": 0}
    now = jax.device_get(talk.state.stream.memory)
    same = [(x == y).all() for x, y in zip(*map(jax.tree.leaves, (now, before)), strict=True)]
    assert all(same) is not write


@pytest.mark.thorough
def test_a_model_without_a_memory_says_so_and_saves_none(programs, text_run):
    config = dataclasses.replace(MODEL, memory_layers=())
    graphdef, params = nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)))
    experiment = dataclasses.replace(text_run.experiment, model=config)
    run = text_run._replace(experiment=experiment, graphdef=graphdef, params=params, memory={})
    warning = (
        "This model has no fast-weight memory, so that only the caches of 'alice' can last; "
        "docs/tutorials/open_model.md puts a memory into a model.\n"
    )
    code, shown, errors = programs("chat", lines="hello\n/memory\n", run=run)
    assert (code, errors) == (0, warning)
    assert shown.endswith("\nThe conversation 'alice', which has no memory, is saved.\n")
    assert programs("generate", run=run)[::2] == (0, warning)


@pytest.mark.slow
def test_a_line_that_is_not_utf8_is_named_and_the_others_are_answered(programs, tmp_path):
    def lines(errors):
        given = io.BytesIO(b"my name is Ann\nca\xff\xfef\xe9\nbye\n")
        return io.TextIOWrapper(given, encoding="utf-8", errors=errors)

    for read, errors in ((35, "strict"), (70, "surrogateescape")):  # 15 + 8 + 4 + 8 each time.
        code, shown, said = programs("chat", lines=lines(errors))
        assert code == 0
        assert said == "Line 2 is not UTF-8 and was left out: ca\\xff\\xfef\\xe9\n"
        assert shown.endswith("The memory 'alice' is saved.\n")
        assert memories.describe(tmp_path / "memories", "alice").num_read == (read,)


@pytest.mark.thorough
def test_a_chat_that_fails_has_saved_its_memory(programs, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_module.Chat, "_command", lambda *_: 1 / 0)
    code, _, errors = programs("chat", lines="hello\n/help\n")
    assert code == 1
    assert "ZeroDivisionError" in errors
    assert memories.describe(tmp_path / "memories", "alice").num_read == (14,)


@pytest.mark.thorough
def test_a_chat_goes_on_where_it_stopped_and_forgets_what_it_is_told_to(programs, tmp_path):
    (tmp_path / "notes.txt").write_text("Alice has a cat.")
    code, first, errors = programs(
        "chat", lines=f"/read {tmp_path / 'notes.txt'}\nhello\n/save day\n"
    )
    assert (code, errors) == (0, "")
    assert first.startswith("alice: 0 tokens read. /help lists the commands.\nRead 16 tokens.\n")
    assert first.endswith("\nSaved as day.\nThe memory 'alice' is saved.\n")
    folder = tmp_path / "memories"
    assert memories.names(folder) == ("alice", "alice@day", "start-0")

    lines = (
        "hello\n/forget day\nhello\n/memory\n/forget night\n/rede x\n/read x\n\n/help\n/quit\nno"
    )
    code, second, errors = programs("chat", lines=lines)
    assert code == 0
    greeting, rest = second.split("\n", 1)
    assert greeting.startswith("alice: 30 tokens read.")  # 16, "hello\n", 8.
    answer, last = rest.split("Back at 30 tokens read.\n")
    assert answer
    assert last.startswith(answer), "the same question in the same state"
    assert "44 tokens read.\nlayer_0/" in last
    assert re.search(r"written after every \d+ tokens and before a question; 6 wait\.", last)
    assert "Points to go back to: day." in last
    assert all(command in last for command in chat_module.HELP)
    problems = errors.splitlines()
    assert problems[0] == "There is no point 'night'; saved are day."
    assert problems[1].startswith("/rede is none of /read, ")
    assert problems[1].endswith("the nearest name is /read.")
    assert problems[2] == "x cannot be read: No such file or directory."
    assert len(problems) == 3
    # What differs from the memory of the run is all that is stored of its tables.
    rows = memories.describe(folder, "alice").rows["stream/memory/layer_0/values"]
    assert 0 < rows[0] < rows[1]

    (tmp_path / "short.txt").write_text("A cat eats")
    read = f"--read={tmp_path / 'short.txt'}"
    code, text, _ = programs("generate", "--prompt=hello ", read)
    assert (code, text[:6]) == (0, "hello ")
    assert memories.describe(folder, "alice").num_read == (44 + 10 + 6 + 8,)
    code, third, _ = programs("chat", "--keep=memory", lines="")
    assert third.startswith("alice: 68 tokens read.")
    assert programs("chat", lines="")[1].startswith("alice: 0 tokens read.")


@pytest.mark.thorough
def test_a_signal_ends_a_chat_with_the_memory_saved(programs, tmp_path):
    class Interrupted(io.StringIO):
        """Lines of which the second is never typed."""

        def readline(self, *_):
            line = super().readline()
            if not line:
                os.kill(os.getpid(), signal.SIGINT)
            return line

    before = signal.getsignal(signal.SIGINT)
    code, shown, _ = programs("chat", lines=Interrupted("hello\n"))
    assert code == 128 + signal.SIGINT
    assert shown.endswith("The memory 'alice' is saved.\n")
    assert signal.getsignal(signal.SIGINT) is before
    assert memories.describe(tmp_path / "memories", "alice").num_read == (14,)


def test_a_memory_stays_with_the_step_it_belongs_to(programs, text_run, tmp_path):
    assert programs("chat")[0] == 0
    later = text_run._replace(params=jax.tree.map(lambda x: x + 1, text_run.params), step=7)
    code, _, errors = programs("chat", run=later)
    assert code == 2
    assert errors.endswith(
        f"belongs to other weights, of {tmp_path}, step 0; use those, or another name.\n"
    )
    assert programs("chat", "--memory=bob", run=later)[0] == 0
    assert programs("chat", f"--memories={tmp_path / 'other'}", run=later)[0] == 0
    assert memories.names(tmp_path / "other") == ("alice", "start-7")
    names = memories.names(tmp_path / "memories")
    assert names == ("alice", "bob", "start-0", "start-7")


def test_a_point_is_named_as_the_user_named_it(programs, tmp_path):
    long = "x" * 95
    code, _, errors = programs("chat", lines=f"/save a point\n/save zoé\n/save {long}\n")
    way_out = "use 1 to 94 ASCII letters, digits and . _ @ + -, without blanks."
    assert code == 0
    assert errors.splitlines() == [
        f"The point {name!r} cannot have this name: {way_out}" for name in ("a point", "zoé", long)
    ]
    assert memories.names(tmp_path / "memories") == ("alice", "start-0")


def test_what_no_chat_can_begin_with_is_refused(programs):
    for arguments, message in (
        (["--memory=start-0"], "name='start-0' is the memory that others begin with"),
        (["--memory=../x"], "name='../x' must be 1 to 100 ASCII letters"),
    ):
        code, _, errors = programs("chat", *arguments)
        assert code == 2
        assert message in errors
        assert len(errors.splitlines()) == 1
