"""Tells a run something in a chat, quits, and asks it in a new one, through `fwpkm chat`.

    python -m lab.real_model.chats --run RUN --out LINES

Each conversation is told to a memory of its own, which lasts as a file; another memory, which was
told nothing, is asked the same.
"""

import json
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


def chat(run: Path, folder: Path, name: str, lines: Sequence[str], tokens: int) -> list[str]:
    """What `fwpkm chat` answers to each line."""
    command = [sys.executable, "-m", "fwpkm_jax", "chat", str(run), "--memory", name]
    command += ["--memories", str(folder), "--keep", "memory", "--max_new_tokens", str(tokens)]
    # What it says of the save parts an answer of several lines from the next one.
    typed = "".join(f"{line}\n/save\n" for line in lines)
    done = subprocess.run(command, input=typed, stdout=subprocess.PIPE, text=True, check=True)
    _, _, answers = done.stdout.partition("\n")
    return [" ".join(one.split()) for one in answers.split("Saved.\n")[:-1]]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, line in enumerate(options.conversations.read_text().splitlines()):
            talk = json.loads(line)
            told, asked = f"told{number}", list(talk["asked"])
            chat(options.run, folder, told, talk["told"], 0)
            bytes_kept = (folder / f"{told}.safetensors").stat().st_size
            answers = [
                chat(options.run, folder, one, asked, options.answer_tokens)
                for one in (told, f"empty{number}")
            ]
            found = {"what": "chat", **talk, "bytes": bytes_kept}
            found |= dict(zip(("said", "not_written"), answers, strict=True))
            print(json.dumps(found), flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
