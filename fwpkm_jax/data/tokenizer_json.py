"""Tokenizers in a `tokenizer.json`, and the chat templates beside it; needs the extra `hf`.

Files beside it in the folder say how a text ends and what a conversation looks like:
`tokenizer_config.json`, `generation_config.json`, `config.json` and `chat_template.jinja`, as the
transformers library writes them.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fwpkm_jax.data import chat_template
from fwpkm_jax.io.untrusted import (
    MOST_JSON_BYTES,
    OutsideFileError,
    is_pointer,
    parse_json,
    reading,
    refuse_pointer,
    shown,
)
from fwpkm_jax.lazy_imports import import_extra
from fwpkm_jax.storage.addresses import address_of, read_small, scheme_of

_MOST_BYTES = 2**27
_MOST_TEMPLATE_BYTES = 2**20
_TEMPLATE = "chat_template.jinja"


class JSONTokenizer:
    """The tokenizer of a `tokenizer.json`.

    Text is encoded without what the file adds at the start or end, and text that spells a control
    token as its characters. A chat template writes control tokens.
    """

    def __init__(self, path: str | Path):
        """Loads a file of this machine or of a bucket.

        Raises:
          ImportError: the package tokenizers is not installed.
          FileNotFoundError: there is no such file.
          ValueError: the file is no tokenizer, or nothing says how a document ends.
        """
        tokenizers = import_extra("tokenizers", f"{address_of(path)} is read", extra="hf")
        self._path = address_of(path)
        self._fetched: dict[str, bytes | None] = {}  # Of a bucket, by name.
        content = read_small(path, most=_MOST_BYTES)
        if is_pointer(content):
            refuse_pointer(self._path)
        with reading(self._path, problem="is no tokenizer.json"):
            self._tokenizer: Any = _parsed(tokenizers, content)
            self._as_built()
        self._tokenizer.encode_special_tokens = True  # As characters.
        self.fingerprint = hashlib.sha256(content).hexdigest()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise OutsideFileError(self._path, "has no tokens", otherwise="fetch it again")
        self.vocab_size = 1 + max(vocabulary.values())
        if self.vocab_size > 2**31 - 1:
            last = max(vocabulary, key=vocabulary.__getitem__)
            problem = f"has the id {self.vocab_size - 1:,}; ids are below 2,147,483,647"
            raise OutsideFileError(self._path, problem, f"token {last!r}", "fetch it again")
        self._config = self._beside("tokenizer_config.json")
        self.stop_ids = self._ends()
        self.eos_id = self.stop_ids[0]
        if self.eos_id >= self.vocab_size:
            problem = f"gives a document's end the id {self.eos_id:,} of {self.vocab_size:,}"
            raise OutsideFileError(
                self._place("config.json"), problem, "eos_token_id", "fetch it again"
            )

    def _as_built(self) -> None:
        """Switches off what a fine-tuning script left in the file, as transformers does.

        Truncation and padding are settings of one call, and dropout draws other pieces of the same
        text each time.
        """
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None

    def _place(self, name: str) -> str:
        """Path or address of a file beside the tokenizer."""
        return address_of(Path(self._path).with_name(name))

    def _read(self, name: str, *, most: int) -> bytes | None:
        """A file beside the tokenizer; None if there is none."""
        if name in self._fetched:
            return self._fetched[name]
        try:
            content = read_small(self._place(name), most=most)
        except FileNotFoundError:
            content = None
        if scheme_of(self._path) is not None:
            self._fetched[name] = content
        return content

    def _beside(self, name: str) -> dict[str, Any]:
        content = self._read(name, most=MOST_JSON_BYTES)
        return {} if content is None else parse_json(content, self._place(name), kind=dict)

    def _ends(self) -> tuple[int, ...]:
        """The ids that end a text, that of the document's end first."""
        ends = [self.special_id("eos_token")]
        for name in ("generation_config.json", "config.json"):
            ids = self._beside(name).get("eos_token_id")
            ids = ids if isinstance(ids, list) else [ids]
            for token in ids:
                if token is not None and (type(token) is not int or not 0 <= token < 2**31):
                    raise OutsideFileError(
                        self._place(name),
                        f"is {shown(repr(token), 60)}; ids of tokens are integers from 0",
                        "eos_token_id",
                        "fetch it again",
                    )
            ends += ids
        ends = tuple(dict.fromkeys(token for token in ends if token is not None))
        if not ends:
            raise ValueError(
                f"Nothing beside {self._path} names the token that ends a document; write "
                'tokenizer_config.json with {"eos_token": "..."} there.'
            )
        return ends

    def special_id(self, name: str) -> int | None:
        """The id of a control token, as `bos_token`; None where the tokenizer has none."""
        return self._tokenizer.token_to_id(self.special_text(name))

    def special_text(self, name: str) -> str:
        """The text of a control token, as `eos_token`; "" where the tokenizer has none."""
        value = self._config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(value, str):
            raise OutsideFileError(
                self._place("tokenizer_config.json"),
                f"is {shown(repr(value), 60)}; a text is expected",
                name,
                "fetch it again",
            )
        return value or ""

    def _encoding(self) -> contextlib.AbstractContextManager[None]:
        """Where the library has no token for a text, the error names the file."""
        return reading(
            self._path, problem="cannot encode this text", otherwise="use another tokenizer"
        )

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, int32 `[tokens]`.

        Raises:
          ValueError: the tokenizer has no token for a part of it.
        """
        with self._encoding():
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(encoded.ids, np.int32)

    def encode_batch(self, texts: Sequence[str], *, num_threads: int) -> list[np.ndarray]:
        """Token ids of each text; the library chooses its threads."""
        with self._encoding():
            encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, np.int32) for one in encoded]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of the ids; control tokens give no text.

        Raises:
          ValueError: an id is none of the tokenizer's.
        """
        ids = [int(token) for token in token_ids]
        if outside := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise ValueError(
                f"token id {outside[0]} is not one of the {self.vocab_size} ids 0 and up."
            )
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template."""
        found = self._config.get("chat_template")
        return bool(found) or self._read(_TEMPLATE, most=_MOST_TEMPLATE_BYTES) is not None

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        """Token ids of a conversation up to where the answer begins, int32 `[tokens]`.

        Raises:
          ImportError: the package jinja2 is not installed.
          ValueError: see `write_chat`.
        """
        return self.encode_written(self.write_chat(messages))

    def encode_written(self, text: str) -> np.ndarray:
        """Token ids of a text that a chat template wrote, control tokens too, int32 `[tokens]`."""
        self._tokenizer.encode_special_tokens = False
        try:
            return self.encode(text)
        finally:
            self._tokenizer.encode_special_tokens = True

    def write_chat(self, messages: Sequence[Mapping[str, str]], *, for_answer: bool = True) -> str:
        """A conversation as the chat template writes it.

        Args:
          messages: each with `role` ("system", "user" or "assistant") and `content`.
          for_answer: up to where the next answer begins; False: up to the end of the last message.

        Raises:
          ImportError: the package jinja2 is not installed.
          ValueError: there is no chat template, it refuses the messages, or a message spells a
            control token, which the model would take for one.
        """
        special = [
            token.content
            for token in self._tokenizer.get_added_tokens_decoder().values()
            if token.special
        ]
        for message in messages:
            spelt = [token for token in special if token in message["content"]]
            if spelt:
                raise ValueError(
                    f"The message holds the control token {spelt[0]!r}; leave it out, or send the "
                    "text without a chat template."
                )
        import_extra("jinja2", "Chat templates are filled in", extra="hf")
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        template, file = self._template()
        values = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": for_answer,
            **{name: self.special_text(name) for name in names},
        }
        try:
            return chat_template.render(template, values)
        except chat_template.TemplateFailedError as error:
            raise OutsideFileError(
                file, f"cannot be filled in: {error}", "chat template", "leave out --chat"
            ) from error

    def _template(self) -> tuple[str, str]:
        """The chat template and the file that holds it."""
        file = self._place(_TEMPLATE)
        content = self._read(_TEMPLATE, most=_MOST_TEMPLATE_BYTES)
        if content is not None:
            with reading(file, problem="is not UTF-8"):
                return content.decode(), file
        file = self._place("tokenizer_config.json")
        template = self._config.get("chat_template")
        if isinstance(template, list):  # Several, by name.
            named = [one for one in template if isinstance(one, dict)]
            template = {str(one.get("name")): one.get("template") for one in named}.get("default")
        if template is None:
            problem = "has no chat template"
            raise OutsideFileError(
                address_of(Path(self._path).parent), problem, otherwise="leave out --chat"
            )
        if not isinstance(template, str):
            raise OutsideFileError(file, "is no text", "chat_template", "leave out --chat")
        return template, file


def _parsed(tokenizers: Any, content: bytes) -> Any:
    try:
        return tokenizers.Tokenizer.from_str(content.decode())
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # What Rust's panics become.
            raise
        raise ValueError(str(error)) from error
