"""`fwpkm chat RUN --memory alice`: lines in, answers out, in a terminal or a pipe.

The memory is loaded, or begun, and saved at the end. Exit codes: 0 done; 2 wrong command line, the
run was not trained on text, or the memory cannot be loaded or saved; 130 and 143 after SIGINT and
SIGTERM, with the memory saved.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fwpkm_jax.cli.conversation_options import PLACES, ConversationOptions
from fwpkm_jax.cli.options import parse_options
from fwpkm_jax.run.chat import Chat
from fwpkm_jax.storage.compile_cache import use_compile_cache


@dataclass(frozen=True, kw_only=True)
class ChatOptions(ConversationOptions):
    """Talks with a run's model; /help lists the commands of a chat."""

    memory: str
    """Name of the memory, which is loaded, or begun, and saved at the end; or its address,
    s3://BUCKET/FOLDER/NAME."""


def main(arguments: Sequence[str], program: str = "fwpkm chat") -> int:
    """Runs the chat that a command line asks for; returns the program's exit code."""
    options = parse_options(ChatOptions, arguments, program, addresses=PLACES)
    use_compile_cache()
    with options.conversation(options.memory) as talk:
        chat = Chat(talk, max_new_tokens=options.max_new_tokens)
        chat.run()
    return 0 if chat.caught is None else 128 + chat.caught
