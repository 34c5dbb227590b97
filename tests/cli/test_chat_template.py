"""What is read in a chat by a template is what the template makes of the whole conversation."""

import contextlib
import dataclasses

import numpy as np
import pytest

from fwpkm_jax.data import TextData
from fwpkm_jax.generation import GenerationOutput
from fwpkm_jax.run import conversation
from fwpkm_jax.run.continue_text import answered
from fwpkm_jax.run.conversation import Conversation
from tests.data.chat_tokenizer import TEMPLATE, save_tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

# As Llama 3's: a beginning that only the first turn has, contents without spaces around them.
OTHER = (
    "<|text|>A day in May.\n{% for m in messages %}<|start|>{{ m.role }}<|end|>\n"
    "{{ m.content | trim }}<|text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n{% endif %}"
)
# As Llama 2's: no control token begins a turn.
PLAIN = (
    "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]\n"
    "{% else %}{{ m.content }}\n\n{% endif %}{% endfor %}"
)


class Script:
    """In the place of `generate`: gives answers from a list, and counts what a model would read."""

    def __init__(self, monkeypatch):
        self.read, self.answers = [], []
        monkeypatch.setattr(conversation, "generate", self)

    def __call__(self, model, prompts, state, *, max_new_tokens, sampling, **options):
        answer = list(self.answers.pop(0)) if max_new_tokens else []
        tokens = [*map(int, prompts[0]), *answer]
        self.read += tokens
        return GenerationOutput(
            tokens=np.array([answer], np.int32),
            lengths=np.array([len(answer)]),
            log_probs=np.zeros((1, len(answer))),
            state=state._replace(
                finished=np.array([bool(answer) and answer[-1] in sampling.stop_ids]),
                num_read=state.num_read + len(tokens),
            ),
        )


@pytest.fixture
def script(monkeypatch):
    return Script(monkeypatch)


@pytest.fixture
def chat_run(text_run, tmp_path):
    """The untrained run with a tokenizer that has a chat template."""

    def made(template):
        tokenizer = str(save_tokenizer(tmp_path, template))
        data = TextData(train_paths=("text.txt",), tokenizer=tokenizer)
        return text_run._replace(experiment=dataclasses.replace(text_run.experiment, data=data))

    return made


def say(talk, message):
    return list(talk.reply(message, max_new_tokens=64))


SAID = ["the cat", "and the hat?", "bat"]
ANSWERED = ["the hat and", "the bat", "a cat"]


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize(
    ("template", "end"), [(TEMPLATE, "<|end|>"), (OTHER, "<|text|>"), (PLAIN, None)]
)
def test_three_turns_read_what_the_template_makes_of_them(
    chat_run, script, tmp_path, template, end, reopened
):
    run = chat_run(template)
    place = {"name": "alice", "folder": tmp_path / "memories"}
    talk = Conversation(run, **place)
    tokenizer = talk.tokenizer
    stop = [] if end is None else tokenizer.encode_written(end).tolist()
    script.answers = [tokenizer.encode(text).tolist() + stop for text in ANSWERED]
    messages = []
    for said, answer in zip(SAID, ANSWERED, strict=True):
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
    expected = tokenizer.encode_written(tokenizer.write_chat(messages, for_answer=False)).tolist()
    with contextlib.ExitStack() as stack:
        stack.enter_context(talk)
        say(talk, SAID[0])
        if reopened:
            talk.save()
            stack.close()
            talk = stack.enter_context(Conversation(run, **place))
        say(talk, SAID[1])
        talk.save("point")
        say(talk, SAID[2])
        assert script.read == expected[: len(script.read)]
        talk.read(np.zeros(0, np.int32))
        assert script.read == expected, "and what the template puts behind the last answer"
        assert talk.tokens_read == len(expected)
        talk.forget("point")
        before = talk.tokens_read
        script.read, script.answers = [], [[]]
        say(talk, SAID[2])
        assert script.read == tokenizer.encode_chat(messages[:5]).tolist()[before:]


def test_text_between_two_turns_follows_what_closes_an_answer(chat_run, script):
    talk = Conversation(chat_run(TEMPLATE))
    tokenizer = talk.tokenizer
    script.answers = [tokenizer.encode("the hat").tolist(), []]  # Cut short: no end.
    say(talk, "the cat")
    talk.read(tokenizer.encode("the bat"))
    say(talk, "and")
    expected = (
        "<|start|>user\nthe cat<|end|><|start|>assistant\nthe hat<|end|>the bat"
        "<|start|>user\nand<|end|><|start|>assistant\n"
    )
    assert script.read == tokenizer.encode_written(expected).tolist()


def test_generate_goes_on_with_a_conversation_and_a_message_without_room_changes_nothing(
    chat_run, script
):
    talk = Conversation(chat_run(TEMPLATE))
    tokenizer = talk.tokenizer
    script.answers = [tokenizer.encode("hat").tolist(), tokenizer.encode("bat").tolist()]
    assert answered(talk, "the", max_new_tokens=8, chat=True, read="a cat") == "hat"
    before = talk.turn, talk.tokens_read
    with pytest.raises(ValueError, match="holds the control token"):
        say(talk, "a<|end|>b")
    assert (talk.turn, talk.tokens_read) == before
    assert answered(talk, "and", max_new_tokens=8, chat=True) == "bat"
    expected = (
        "a cat<|start|>user\nthe<|end|><|start|>assistant\nhat<|end|>"
        "<|start|>user\nand<|end|><|start|>assistant\nbat"
    )
    assert script.read == tokenizer.encode_written(expected).tolist()


def test_a_memory_without_caches_begins_a_new_conversation(chat_run, script, tmp_path):
    run = chat_run(OTHER)
    place = {"name": "alice", "folder": tmp_path / "memories", "keep": "memory"}
    script.answers = [[], []]
    for _ in range(2):
        del script.read[:]
        with Conversation(run, **place) as talk:
            say(talk, "the cat")
            talk.save()
        first = talk.tokenizer.encode_chat([{"role": "user", "content": "the cat"}])
        assert script.read == first.tolist()


def test_a_template_that_leaves_answers_out_cannot_go_on(chat_run, script):
    talk = Conversation(chat_run("{{ messages[-1].content }}"))
    script.answers = [[]]
    say(talk, "the cat")
    with pytest.raises(ValueError, match="leaves earlier answers out"):
        say(talk, "and")
