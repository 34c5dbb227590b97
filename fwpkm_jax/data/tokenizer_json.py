"""Tokenizers in a `tokenizer.json`, and the chat templates beside it; needs the extra `hf`.

Files beside it in the folder say how a text ends and what a conversation looks like:
`tokenizer_config.json`, `generation_config.json`, `config.json` and `chat_template.jinja`, as the
transformers library writes them.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np


class JSONTokenizer:
    """The tokenizer of a `tokenizer.json`.

    Text is encoded without what the file adds at the start or end, and text that spells a control
    token as its characters. A chat template writes control tokens.
    """

    def __init__(self, path: str | Path):
        """Loads a file.

        Raises:
          ImportError: the package tokenizers is not installed.
          ValueError: the file is no tokenizer, or nothing says how a document ends.
        """
        tokenizers = _package("tokenizers", f"{path} is read")
        self._path = Path(path)
        content = self._path.read_bytes()
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # The library raises plain ones.
            raise ValueError(f"{path} is no tokenizer.json ({error}).") from error
        self._as_built()
        self._tokenizer.encode_special_tokens = True  # As characters.
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self._config = self._beside("tokenizer_config.json")
        self.stop_ids = self._ends()
        self.eos_id = self.stop_ids[0]

    def _as_built(self) -> None:
        """Switches off what a fine-tuning script left in the file, as transformers does.

        Truncation and padding are settings of one call, and dropout draws other pieces of the same
        text each time.
        """
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None

    def _beside(self, name: str) -> dict[str, Any]:
        file = self._path.with_name(name)
        return json.loads(file.read_bytes()) if file.is_file() else {}

    def _ends(self) -> tuple[int, ...]:
        """The ids that end a text, that of the document's end first."""
        ends = [self._tokenizer.token_to_id(self.special_text("eos_token"))]
        for name in ("generation_config.json", "config.json"):
            ids = self._beside(name).get("eos_token_id")
            ends += ids if isinstance(ids, list) else [ids]
        ends = tuple(dict.fromkeys(int(token) for token in ends if token is not None))
        if not ends:
            raise ValueError(
                f"Nothing beside {self._path} names the token that ends a document; write "
                'tokenizer_config.json with {"eos_token": "..."} there.'
            )
        return ends

    def special_text(self, name: str) -> str:
        """The text of a control token, as `eos_token`; "" where the tokenizer has none."""
        value = self._config.get(name)
        return value.get("content", "") if isinstance(value, dict) else value or ""

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, int32 `[tokens]`."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str], *, num_threads: int) -> list[np.ndarray]:
        """Token ids of each text; the library chooses its threads."""
        del num_threads
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
        return self._path.with_name("chat_template.jinja").is_file() or bool(
            self._config.get("chat_template")
        )

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        """Token ids of a conversation up to where the answer begins, int32 `[tokens]`.

        Args:
          messages: see `write_chat`.

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
        jinja2 = _package("jinja2", "Chat templates are filled in")
        sandbox = _package("jinja2.sandbox", "Chat templates are filled in")
        # A template is a program from elsewhere: it sees these values and nothing else.
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        try:
            return environment.from_string(self._template()).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=for_answer,
                **{name: self.special_text(name) for name in names},
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"The chat template of {self._path.parent}: {error}.") from error

    def _template(self) -> str:
        file = self._path.with_name("chat_template.jinja")
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self._config.get("chat_template")
        if isinstance(template, list):  # Several, by name.
            template = {one["name"]: one["template"] for one in template}.get("default")
        if template is None:
            raise ValueError(f"{self._path.parent} has no chat template; leave out --chat.")
        return template


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: str) -> NoReturn:
    raise _package("jinja2", "Chat templates are filled in").TemplateError(message)


def _package(name: str, what: str) -> Any:
    """A package that only some installations have."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{what} by the package {name.split('.')[0]}; in a checkout of fwpkm_jax run: "
            "pip install -e '.[hf]'"
        ) from error
