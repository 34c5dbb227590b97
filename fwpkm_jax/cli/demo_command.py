"""`fwpkm demo`: a small model is told numbers, reads on, is started again and asked for them.

The model comes with the package (`fwpkm_jax/demo`). Exit codes: 0 done; 2 wrong command line, or
the memory cannot be loaded or saved; 130 and 143 after SIGINT and SIGTERM, with the memory saved.
"""

import operator
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from fwpkm_jax.cli.options import parse_options
from fwpkm_jax.data import stream_documents
from fwpkm_jax.interchange import read_folder
from fwpkm_jax.io.terminal import visible
from fwpkm_jax.run.chat import Chat
from fwpkm_jax.run.conversation import Conversation
from fwpkm_jax.run.load import Run
from fwpkm_jax.storage.compile_cache import use_compile_cache
from fwpkm_jax.training.state import model_graph

FOLDER = Path(__file__).parents[1] / "demo"
"""The model's weights, configuration and card."""
FACTS = {
    "Mara": "4829",
    "Otto": "1736",
    "Ines": "9052",
    "Bruno": "6418",
    "Lea": "2597",
    "Viktor": "8360",
}
"""What the script tells the model."""
READ_BYTES = 1500
"""Length of the text that the script lets it read afterwards."""
_DIGITS = 4
_TIMES = 2  # A number told once is often not known yet.
_HEADING = len("I\n\n")  # The number of the book's first chapter.
_FACT = re.compile(r"Call ([A-Z][a-z]{2,5}) at ([0-9]{4})\.?\s*")
_TOLD = re.compile(f"(?:{_FACT.pattern})+")
_ASKED = re.compile(r"(?:Call )?([A-Z][a-z]{2,5})(?: at)? ?\??")
_FORM = (
    'The model knows one sentence. "Call Mara at 4829." tells it a number, "Mara?" asks for it.\n'
    "A line may tell several. Names have 3 to 6 letters, numbers 4 digits. The model understands\n"
    "nothing else, and errs at times."
)


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Tells a small trained model numbers, lets it read on, starts it again and asks for them."""

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
    if options.memory is not None and options.memory.exists() and not options.memory.is_dir():
        raise ValueError(f"memory={options.memory} is a file; name a folder, which may be new.")
    use_compile_cache()
    if options.memory is not None:
        return _talk(options.memory, write=options.write)
    with tempfile.TemporaryDirectory() as folder:
        _script(Path(folder))
    return 0


def demo_run() -> Run:
    """The model that comes with the package."""
    experiment, weights = read_folder(FOLDER)
    return Run(experiment, model_graph(experiment.model), weights.params, weights.memory, step=0)


def sentence(name: str, number: str) -> str:
    """The sentence that tells a number."""
    return f"Call {name} at {number}. "


def ask(talk: Conversation, name: str) -> str:
    """The number that the model answers; the question is not written."""
    question = talk.tokenizer.encode(f" Call {name} at ")
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
    run = demo_run()
    model = run.experiment.model
    weights = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    print(
        f"A model of {weights:,} weights with a memory of {model.fast_weight.rule.num_slots:,} "
        f"slots.\n{_FORM}\n\n1. Tell it {len(FACTS)} numbers, twice.\n"
    )
    told = [sentence(*fact) for fact in FACTS.items()]
    for first in range(0, len(told), 3):
        print(f"   {''.join(told[first : first + 3])}")
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
        answers = [ask(talk, name) for name in FACTS]
    with conversation(run, folder, write=False) as talk:
        guesses = [ask(talk, name) for name in FACTS]
    row = "   {:20}{:8}{:15}{}"
    print(row.format("asked", "told", "memory written", "not written"))
    for (name, number), *said in zip(FACTS.items(), answers, guesses, strict=True):
        print(row.format(f"Call {name} at", number, *map(visible, said)))
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
    with conversation(demo_run(), folder, write=write) as talk:
        chat = _Talk(talk, write=write)
        chat.run()
    return 0 if chat.caught is None else 128 + chat.caught
