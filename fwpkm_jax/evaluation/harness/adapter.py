"""A model with its memory as a model of lm-evaluation-harness; needs the extra `lm-eval`."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fwpkm_jax.data import Tokenizer
from fwpkm_jax.evaluation.harness.options import HarnessConfig
from fwpkm_jax.evaluation.readers.batch_reader import BatchReader, Part, Prompt, Text
from fwpkm_jax.evaluation.readers.prompts import num_shared
from fwpkm_jax.models.language_model import LanguageModel, Memory

MISSING: ModuleNotFoundError | None = None
"""Why the harness cannot be imported; None if it is there."""
_harness: dict[str, Any] = {}
try:
    for _module in ("api.model", "models.utils", "utils"):
        _harness[_module] = importlib.import_module(f"lm_eval.{_module}")
except ModuleNotFoundError as _error:  # Documentation may name the class; it cannot be made.
    MISSING = _error
_Base: Any = object if MISSING is not None else _harness["api.model"].TemplateLM

INSTALL = (
    "lm-evaluation-harness, or a package that it needs, is missing; in a checkout of fwpkm_jax "
    "run: pip install -e '.[lm-eval]'"
)
_MOST_NEW_TOKENS = 256  # The harness' own default, where a task names no number.


class HarnessModel(_Base):
    """A `LanguageModel` that the harness can ask: log-likelihoods, rolling ones, greedy texts.

    Every request is a text of its own: it starts from the memory as given and writes while it is
    read, its continuation or answer included. Contexts are never cut unless `max_length` says so,
    because a memory has no longest text. With `question_from`, a context is a document and a
    question: the document is read, once or more often, and written to its end before the question
    is read, with or without attention to the document.

    Example:
      >>> from lm_eval import simple_evaluate  # doctest: +SKIP
      >>> from fwpkm_jax import load_run  # doctest: +SKIP
      >>> from fwpkm_jax.data import load_tokenizer  # doctest: +SKIP
      >>> run = load_run("runs/qwen")  # doctest: +SKIP
      >>> tokenizer = load_tokenizer(run.experiment.data.text.tokenizer)  # doctest: +SKIP
      >>> model = HarnessModel(run.model, run.memory, tokenizer)  # doctest: +SKIP
      >>> simple_evaluate(model=model, tasks=["lambada_openai"])["results"]  # doctest: +SKIP
    """

    def __init__(
        self,
        model: LanguageModel,
        memory: Memory,
        tokenizer: Tokenizer,
        config: HarnessConfig | None = None,
        *,
        write: bool = True,
    ):
        """Prepares the reading.

        Args:
          model: the language model.
          memory: fast weights, leaves `[groups, ...]`, of which the first group is used.
          tokenizer: the model's.
          config: how requests are read; None: the default options. Tasks and data are not used.
          write: False keeps the memory as it is.

        Raises:
          ImportError: the harness is not installed.
          ValueError: the tokenizer has no first token to add, or the sizes do not fit.
        """
        if MISSING is not None:
            raise ImportError(INSTALL) from MISSING
        super().__init__()
        config = HarnessConfig() if config is None else config
        self._reader = BatchReader(model, memory, config, write=write)
        self._tokens, self._vocab_size = tokenizer, model.config.vocab_size
        # A `tokenizer.json` may name the token that starts a text.
        self._bos: int | None = getattr(tokenizer, "special_id", lambda name: None)("bos_token")
        if config.add_bos and self._bos is None:
            raise ValueError(
                "add_bos=True: the tokenizer names no token that starts a text; leave it out."
            )
        self._add_bos, self._longest = config.add_bos, config.max_length
        self._question_from = config.question_from
        self.scored_tokens = 0
        """Tokens of all continuations and answers so far."""

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document."""
        return self._tokens.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without context: the first token's, else `eot_token_id`."""
        return self.eot_token_id if self._bos is None else self._bos

    @property
    def max_length(self) -> int | None:
        """Tokens that a request may have; None: any number."""
        return self._longest

    @property
    def tokenizer_name(self) -> str:
        """Tells tokenizers apart in the harness' caches."""
        return self._tokens.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids of a text, with the first token in front where `add_bos` asks for it."""
        ids = self._tokens.encode(string).tolist()
        first = self._add_bos if add_special_tokens is None else False
        return [self.prefix_token_id, *ids] if first else ids

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        texts = [self._text(text, *tokens) for text, *tokens in requests]
        scores = [parts[0] for parts in self._score(texts)]
        found = [(score.nats, score.greedy) for score in scores]
        for (text, *_), score in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", text, score)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood in nats of each whole text, after the prefix token.

        Raises:
          ValueError: a question is asked for, which whole texts have not.
        """
        if self._question_from is not None:
            raise ValueError(
                f"question_from={self._question_from!r}: a task scores whole texts, which have no "
                "question; leave it out."
            )
        strings = [request.args[0] for request in requests]
        texts = [self._windows(string) for string in strings]
        # A text without tokens has nothing to predict.
        scored = iter(self._score([Text(parts) for parts in texts if parts]))
        found = [sum(part.nats for part in next(scored)) if parts else 0.0 for parts in texts]
        for string, score in zip(strings, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (string,), score)
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The greedy text after each context, up to the first of its stops.

        Raises:
          ValueError: a task asks for sampling.
        """
        arguments = [request.args for request in requests]
        # Requests whose stops or lengths differ are read apart, as in the harness' own backend.
        groups: dict[str, list[int]] = {}
        for number, (_, options) in enumerate(arguments):
            groups.setdefault(repr(sorted(options.items())), []).append(number)
        found: dict[int, str] = {}
        for numbers in groups.values():
            found |= self._generate(numbers, arguments)
        for number, text in sorted(found.items()):
            self.cache_hook.add_partial("generate_until", arguments[number], text)
        return [found[number] for number in range(len(requests))]

    def _generate(
        self, numbers: Sequence[int], arguments: Sequence[tuple[str, dict[str, Any]]]
    ) -> dict[int, str]:
        options = _harness["models.utils"].normalize_gen_kwargs(
            dict(arguments[numbers[0]][1]), _MOST_NEW_TOKENS
        )
        if options.get("do_sample") and options.get("temperature", 1.0) != 0:
            raise ValueError(
                f"A task asks for sampled texts (temperature={options.get('temperature', 1.0)}); "
                "only greedy ones are compared: set do_sample to false in its generation_kwargs."
            )
        most = int(options["max_gen_toks"])
        until = [stop for stop in options["until"] if stop]
        decode = self._decode
        answers = self._reader.answers(
            [self._prompt(arguments[number][0], most) for number in numbers],
            max_new_tokens=most,
            stop_ids=[token for token in self._tokens.stop_ids if token < self._vocab_size],
            ended=lambda tokens: any(stop in decode(tokens) for stop in until),
        )
        self.scored_tokens += sum(map(len, answers))
        texts = [decode(answer) for answer in answers]
        return {number: _cut(text, until) for number, text in zip(numbers, texts, strict=True)}

    def _decode(self, tokens: np.ndarray) -> str:
        # A model may have more rows in its embedding than the tokenizer has ids.
        return self._tokens.decode(tokens[tokens < self._tokens.vocab_size])

    def _prompt(self, context: str, most: int) -> Prompt:
        tokens = np.asarray(self.tok_encode(context) or [self.prefix_token_id], np.int32)
        if self._longest is not None and most >= self._longest:
            raise ValueError(
                f"max_length={self._longest} leaves no room for the {most} new tokens that a "
                "task asks for; raise it."
            )
        document, question = self._split(context, tokens, self._longest and self._longest - most)
        return Prompt(question, document)

    def _text(self, request: tuple[str, str], context: list[int], continuation: list[int]) -> Text:
        number = len(continuation)
        if not number:
            raise ValueError(
                f"The continuation {request[1]!r:.60} has no token of its own after its context."
            )
        if self._longest is not None and number > self._longest:
            raise ValueError(
                f"max_length={self._longest} is less than the {number} tokens of a continuation; "
                "raise it."
            )
        most = None if self._longest is None else self._longest + 1 - number
        document, question = self._split(request[0], np.asarray(context, np.int32), most)
        return Text((Part(question, np.asarray(continuation, np.int32)),), document)

    def _split(
        self, context: str, tokens: np.ndarray, most: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Document and question of a context, whose tokens lose their start beyond `most`."""
        cut, dropped = 0, 0 if most is None else max(len(tokens) - most, 0)
        if self._question_from is not None:
            at = context.rfind(self._question_from)
            if at < 0:
                raise ValueError(
                    f"question_from={self._question_from!r} does not stand in the context that "
                    f"ends {context[-60:]!r}; give the words that begin the question."
                )
            # At least one token is left to answer after.
            cut = min(num_shared(self.tok_encode(context[:at]), tokens), len(tokens) - 1)
        return tokens[dropped : max(cut, dropped)], tokens[max(cut, dropped) :]

    def _windows(self, string: str) -> list[Part]:
        tokens = self.tok_encode(string)
        if self._longest is None:
            windows = [([self.prefix_token_id], tokens)] if tokens else []
        else:
            windows = [
                _harness["utils"].make_disjoint_window(window)
                for window in _harness["utils"].get_rolling_token_windows(
                    token_list=tokens,
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self._longest,
                    context_len=1,
                )
            ]
        return [Part(*(np.asarray(x, np.int32) for x in window)) for window in windows]

    def _score(self, texts: Sequence[Text]) -> list[Any]:
        self.scored_tokens += sum(len(part.continuation) for text in texts for part in text.parts)
        return self._reader.log_likelihoods(texts)


def _cut(text: str, until: Sequence[str]) -> str:
    """The text before the first of the stops."""
    return text[: min((text.find(stop) for stop in until if stop in text), default=len(text))]
