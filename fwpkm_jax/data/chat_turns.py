"""A conversation as a chat template writes it, read one turn after the other."""

from typing import Literal, NamedTuple

import numpy as np

from fwpkm_jax.data.tokenizer_json import JSONTokenizer

_QUESTION, _ANSWER = "question", "fwpkm_jax-answer"
"""Messages in the place of earlier ones; templates may trim them."""


class Turn(NamedTuple):
    """How far a conversation has been read.

    Attributes:
      at: "start": nothing of it. "answer": all up to an answer's last token. "closed": also what
        the template puts behind an answer.
      stop: the token that ended the answer; None: none did, or it is closed.
    """

    at: Literal["start", "answer", "closed"] = "start"
    stop: int | None = None


START = Turn()
"""Of a conversation that begins."""


def has_template(tokenizer: object) -> bool:
    """Whether `message_tokens` can be called."""
    return isinstance(tokenizer, JSONTokenizer) and tokenizer.has_chat_template


def message_tokens(tokenizer: object, message: str, turn: Turn = START) -> np.ndarray:
    """Token ids from `turn` to where the answer to a message begins, int32 `[tokens]`.

    With the answers between them they are the tokens of the whole conversation, where the answers
    are as the tokenizer would write them, and the template shows them as they are.

    Raises:
      ValueError: the tokenizer has no chat template; see `JSONTokenizer.encode_chat`; or the
        template leaves earlier answers out.
    """
    if not isinstance(tokenizer, JSONTokenizer):
        raise ValueError(
            f"A {type(tokenizer).__name__} has no chat template; those of imported models may."
        )
    new = {"role": "user", "content": message}
    if turn.at == "start":
        return tokenizer.encode_chat([new])
    closing, rest = _behind_an_answer(tokenizer, new)
    if turn.at == "closed":
        return tokenizer.encode_written(rest.removeprefix(closing))
    return _behind_stop(tokenizer, rest, closing, turn.stop)


def closing_tokens(tokenizer: object, turn: Turn) -> np.ndarray:
    """Token ids of what the template puts behind an answer and was not read, int32 `[tokens]`."""
    if turn.at != "answer" or not isinstance(tokenizer, JSONTokenizer):
        return np.zeros(0, np.int32)
    closing, _ = _behind_an_answer(tokenizer, {"role": "user", "content": _QUESTION})
    return _behind_stop(tokenizer, closing, closing, turn.stop)


def _behind_an_answer(tokenizer: JSONTokenizer, new: dict[str, str]) -> tuple[str, str]:
    """What the template writes behind an answer, alone and with a new message after it."""
    before = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _ANSWER},
    ]
    whole = tokenizer.write_chat([*before, new])
    _, found, rest = whole.partition(_ANSWER)
    if not found:
        raise ValueError(
            "The chat template leaves earlier answers out, so that a conversation cannot go on; "
            "begin another memory, or send the text without the template."
        )
    closing = tokenizer.write_chat(before, for_answer=False).partition(_ANSWER)[2]
    return closing if rest.startswith(closing) else "", rest


def _behind_stop(tokenizer: JSONTokenizer, text: str, closing: str, stop: int | None) -> np.ndarray:
    """Tokens of a text behind an answer, without those up to the answer's stop token."""
    tokens = tokenizer.encode_written(text)
    if stop in tokenizer.encode_written(closing).tolist() or stop in tokens[:1].tolist():
        return tokens[1 + tokens.tolist().index(stop) :]
    return tokens
