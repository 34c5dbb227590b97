"""Tells a run something in a chat, quits, and asks it in a new one, through `fwpkm chat`.

    python -m lab.real_model.chats --run RUN --out LINES

Each conversation is told to a memory of its own, which lasts as a file; another memory, which was
told nothing, is asked the same.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.options import parse

FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tells a run something in a chat and asks it in the next."""

    run: Path
    """Directory of the run."""
    conversations: Path = FOLDER / "conversations.jsonl"
    """What is told and asked, JSON lines."""
    answer_tokens: int = 6
    """Most tokens of an answer."""
    out: Path | None = None
    """JSON lines, to which the results are added."""


def chat(run: Path, folder: Path, name: str, typed: str, tokens: int) -> str:
    """What `fwpkm chat` prints for what is typed, without its first line."""
    command = [sys.executable, "-m", "fwpkm_jax", "chat", str(run), "--memory", name]
    command += ["--memories", str(folder), "--keep", "memory", "--max_new_tokens", str(tokens)]
    done = subprocess.run(command, input=typed, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.partition("\n")[2]


def ask(run: Path, folder: Path, name: str, questions: Sequence[str], tokens: int) -> list[str]:
    """What a memory answers to each question as it was before the first."""
    typed = "".join(f"{question}\n/forget\n" for question in questions)
    printed = chat(run, folder, name, typed, tokens)
    answers = re.split(r"^Back at .* tokens read\.$", printed, flags=re.MULTILINE)[:-1]
    return [" ".join(one.split()) for one in answers]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv)
    talks = [json.loads(line) for line in options.conversations.read_text().splitlines()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        questions = [question for talk in talks for question in talk["asked"]]
        empty = iter(ask(options.run, folder, "empty", questions, options.answer_tokens))
        for number, talk in enumerate(talks):
            memory = f"told{number}"
            chat(options.run, folder, memory, "\n".join([*talk["told"], ""]), 0)
            found = {
                "what": "chat",
                **talk,
                "bytes": (folder / f"{memory}.safetensors").stat().st_size,
                "said": ask(
                    options.run, folder, memory, list(talk["asked"]), options.answer_tokens
                ),
                "not_written": [next(empty) for _ in talk["asked"]],
            }
            print(json.dumps(found), flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
