"""`fwpkm generate RUN --prompt TEXT [--seed 1] [--memory alice]`.

Prints the prompt and the generated text. Control bytes that a model of bytes writes are shown as
escapes such as `\\x1b`, in a terminal or a pipe; `continue_text` gives the text itself. Exit codes:
0 done; 2 wrong command line, the run was not trained on text, or the memory cannot be loaded or
saved.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fwpkm_jax.cli.conversation_options import PLACES, ConversationOptions
from fwpkm_jax.cli.options import parse_options
from fwpkm_jax.io.terminal import visible
from fwpkm_jax.run.chat import read_text
from fwpkm_jax.run.continue_text import answered
from fwpkm_jax.storage.compile_cache import use_compile_cache


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ConversationOptions):
    """Continues a text with a run's model."""

    prompt: str = "The "
    """Text to continue; the model reads it first."""
    read: Path | None = None
    """A text file that is read before the prompt and not printed."""
    memory: str | None = None
    """Name of a memory, or its address, s3://BUCKET/FOLDER/NAME: it is loaded, or begun, and saved
    after the answer. None: nothing is kept."""
    write: bool = True
    """Write prompt and answer into the memory. Off: it stays as the checkpoint has it."""
    chat: bool = False
    """The prompt is a message: the chat template of an imported model's tokenizer puts it into the
    form that the model was trained on, and only the answer is printed."""


def main(arguments: Sequence[str], program: str = "fwpkm generate") -> int:
    """Prints the text that a command line asks for; returns the program's exit code."""
    options = parse_options(GenerateOptions, arguments, program, addresses=PLACES)
    read = "" if options.read is None else read_text(options.read)
    use_compile_cache()
    with options.conversation(options.memory, write=options.write) as talk:
        text = answered(
            talk,
            options.prompt,
            max_new_tokens=options.max_new_tokens,
            chat=options.chat,
            read=read,
        )
        talk.save()
    print(visible(text))
    return 0
