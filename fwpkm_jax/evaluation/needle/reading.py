"""The needle protocol: what is read in which order, and when the memory is written."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fwpkm_jax.core.streams.pending import ChunkSize
from fwpkm_jax.data import Tokenizer
from fwpkm_jax.evaluation.interface import Subject
from fwpkm_jax.evaluation.needle.config import NeedleConfig
from fwpkm_jax.evaluation.needle.samples import NeedleSample
from fwpkm_jax.evaluation.readers.prompts import encode_parts
from fwpkm_jax.evaluation.readers.stream_reader import StreamReader, decode
from fwpkm_jax.evaluation.readers.tracing_reader import TracingReader
from fwpkm_jax.models.language_model import LanguageModel


class Prompt(NamedTuple):
    """A sample as token ids."""

    haystack: np.ndarray
    question: np.ndarray
    digits: int
    """Tokens of the answer."""


def encode_prompt(sample: NeedleSample, tokenizer: Tokenizer) -> Prompt:
    """Token ids of haystack and question; see `encode_parts`."""
    parts = encode_parts(sample.haystack, sample.question, tokenizer)
    return Prompt(*parts, digits=len(sample.answer))


def open_reader(
    model: LanguageModel,
    subject: Subject,
    prompts: Sequence[Prompt],
    config: NeedleConfig,
    tokenizer: Tokenizer,
) -> StreamReader:
    """A reader of a subject's first memory, with room for each of the prompts and its answer."""
    longest = max(len(p.haystack) + len(p.question) for p in prompts)
    question = max(len(p.question) for p in prompts)
    digits = max(p.digits for p in prompts)
    fast_weight = model.config.fast_weight
    chunk_size: ChunkSize
    match config.chunk_size:
        case "text" if not fast_weight.rule.reads_own_writes:
            chunk_size = "flush"
        # What reads its own writes has written the text when it has read it.
        case "text" | "model":
            chunk_size = fast_weight.chunk_size
        case number:
            chunk_size = number
    return StreamReader(
        model,
        subject.first_memory,
        # A write may contain a whole prompt and the tokens that the previous sample left waiting.
        capacity=longest + fast_weight.rule.lookahead + question + digits,
        max_length=longest + digits,
        piece_length=config.piece_length,
        vocab_size=tokenizer.vocab_size,
        write=config.write,
        chunk_size=chunk_size,
        fast_weight_dtype=subject.fast_weight_dtype,
        partition=subject.partition,
    )


def answer_each(
    reader: StreamReader | TracingReader,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    config: NeedleConfig,
    *,
    readings: int,
) -> Iterator[str]:
    """The decoded answers in order; the reader's memory is reset first.

    Chunks shorter than the text are written as they fill. `paper` mode then also writes the rest at
    the end of a reading; `reference` mode leaves the rest waiting.
    """
    reader.reset_memory()
    ends_written = config.mode == "paper" or config.chunk_size == "text"
    for number, prompt in enumerate(prompts):
        if number and config.reset_memory_between_samples:
            reader.reset_memory()
        for _ in range(readings - 1):
            reader.restart()
            reader.read(prompt.haystack)
            if ends_written:
                reader.write()
        reader.restart()
        reader.read(prompt.haystack)
        if config.mode == "paper":
            reader.write()
        reader.read(prompt.question)
        # Both modes choose the next token before this write, which the release makes here.
        answer = reader.next_token()
        if config.mode == "reference" and ends_written:
            reader.write()
        yield tokenizer.decode(decode(reader, answer, length=prompt.digits))
