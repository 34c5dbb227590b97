"""Slot tracing: for an answer about a needle, the slots read and the tokens that wrote them.

References: Zhao and Jones 2026, arXiv:2601.00671, section 5.1; Figure 7.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fwpkm_jax.data import Tokenizer, load_tokenizer
from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.interface import Evaluation, Outcome, Subject
from fwpkm_jax.evaluation.needle.config import NeedleConfig
from fwpkm_jax.evaluation.needle.reading import answer_each, encode_prompt, open_reader
from fwpkm_jax.evaluation.needle.samples import NeedleSample, take_samples
from fwpkm_jax.evaluation.readers.tracing_reader import SlotRead, TracingReader
from fwpkm_jax.evaluation.reconfigure import with_yarn
from fwpkm_jax.evaluation.record import describe_resets
from fwpkm_jax.evaluation.sources import files_of, missing_text, text_sources, texts_of
from fwpkm_jax.paper.evaluation import trace_views as views
from fwpkm_jax.paper.evaluation.token_texts import token_texts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Slot trace of an answer to a needle question, as in needle's mode paper."""

    haystack_words: int = 4000
    """Whitespace words of a haystack."""
    readings: int = 4
    """How often the haystack is read before the answer."""
    samples: int = 500
    """Samples tried at most until one is answered correctly. Where none is, the answer with the
    most correct digits is shown, and the page says so."""

    def __post_init__(self) -> None:
        _ = self.needles  # Checked here.

    @property
    def needles(self) -> NeedleConfig:
        """The needle evaluation that is traced."""
        return NeedleConfig(
            haystack_words=(self.haystack_words,), readings=(self.readings,), samples=self.samples
        )


def evaluate(
    subject: Subject,
    config: TraceConfig,
    *,
    texts: Callable[[], Iterable[tuple[str, str]]] | None = None,
    tokenizer: Tokenizer | None = None,
) -> Outcome:
    """Answers samples until an answer is correct, and traces the slots read for that answer.

    A slot is a hit if the target that was last written into it is the correct next token.

    Args:
      subject: the model, whose memories have slots, and its memory, of which the first group is
        used; its seed is the samples'.
      config: the protocol.
      texts: starts a pass over pairs of id and text; None: the texts that options and run name.
      tokenizer: the model's tokenizer; None: the run's.

    Returns:
      Numbers are the `sample`, how many were `tried`, whether the answer is `exact`, and for each
      token of the answer its `layers`: gate, slots, weights, latest entries, hits. Arrays hold for
      each layer the latest query, target and score of every slot, `[slots]`; -1 for slots that were
      never written.

    Raises:
      ValueError: the model's memories have no slots, the texts give no sample, or the answer is not
        one token per digit.
    """
    model, needles, words = subject.model, config.needles, config.haystack_words
    rule = model.config.fast_weight.rule
    if not model.config.memory_layers or rule.num_slots is None:
        raise ValueError("The model has no fast-weight memory with slots to trace.")
    tokenizer = load_tokenizer(subject.text.tokenizer) if tokenizer is None else tokenizer
    files: dict[str, str] = {}
    if texts is None:
        sources = text_sources(subject.text)
        files = files_of(source.files for source in sources)
        texts = partial(texts_of, sources, tokenizer)
    model = with_yarn(
        model, factor=needles.factor(words), original_length=needles.yarn_original_length
    )
    samples = take_samples(texts(), needles, words=words, seed=subject.seed)
    prompts = [encode_prompt(sample, tokenizer) for sample in samples]
    reader = TracingReader(open_reader(model, subject, prompts, needles, tokenizer), rule)
    best: dict[str, Any] = {"right": -1}
    arrays: dict[str, np.ndarray] = {}
    tried = 0
    answers = answer_each(reader, prompts, tokenizer, needles, readings=config.readings)
    forecast = Forecast("trace", total=len(samples), unit="samples at most")
    for sample, answer in zip(samples, answers, strict=False):
        tried += 1
        forecast.add(1)
        right = sum(a == b for a, b in zip(answer, sample.answer, strict=False))
        if right > best["right"] or answer.strip() == sample.answer:
            best = _describe(reader, sample, answer, right, tokenizer)
            arrays = _log_arrays(reader, rule.lookahead)
        if best["exact"]:
            break
    if not best["exact"]:
        logger.warning(
            "No answer to %d samples was right; the best has %d digits right.", tried, best["right"]
        )
    return Outcome(
        numbers={
            "tried": tried,
            "slots": rule.num_slots,
            "gate_mixes": model.config.fast_weight.gate_in_output,
            **best,
        },
        scored_tokens=sum(prompt.digits for prompt in prompts[:tried]),
        arrays=arrays,
        files=files,
        mode=needles.mode,
        resets=describe_resets(
            subject.memory, fast_weights="never", queue="never", caches="reading"
        ),
        chunk_size="one write per reading, all waiting tokens",
        model=model,
    )


def _describe(
    reader: TracingReader, sample: NeedleSample, answer: str, right: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """A record of the answer and of what the memories read for each of its tokens."""
    expected = tokenizer.encode(sample.question + sample.answer)[-len(sample.answer) :]
    if tokenizer.decode(expected).strip() != sample.answer:
        raise ValueError(
            f"The tokenizer does not make one token of each digit of {sample.answer}; its answers "
            "cannot be traced."
        )
    tokens = []
    for place, reads in enumerate(reader.reads):
        layers = {}
        for layer, read in reads.items():
            slots = [describe_slot(slot, int(expected[place]), tokenizer) for slot in read.slots]
            layers[layer] = {
                "gate": read.gate,
                "hit_weight": sum(slot["weight"] for slot in slots if slot["hit"]),
                "slots": slots,
            }
        tokens.append(
            {
                "expected": sample.answer[place],
                "generated": answer[place : place + 1],
                "layers": layers,
            }
        )
    target = sample.needles[sample.target]
    return {
        "right": right,
        "exact": answer.strip() == sample.answer,
        "answer": answer,
        "sample": {
            "document": sample.document,
            "words": sample.words,
            "question": sample.question,
            "answer": sample.answer,
            "needle": target.sentence,
            "depth": sample.depth,
            "other_needles": [n.sentence for n in sample.needles if n is not target],
        },
        "written_slots": {
            layer: int(np.sum(log.position >= 0)) for layer, log in reader.logs.items()
        },
        "tokens": tokens,
    }


def describe_slot(read: SlotRead, expected: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """A record of a slot read for an answer's token; `expected` is the id of the correct token."""
    entry = read.entry
    described = {
        "slot": read.slot,
        "weight": read.weight,
        "hit": entry is not None and entry.target == expected,
        "entry": None,
    }
    if entry is None:
        return described
    # Decoded together, so that spaces and characters of several tokens are correct.
    texts = token_texts(tokenizer, [*entry.before, entry.target, *entry.after])
    at = len(entry.before)
    return described | {
        "entry": {
            "query": token_texts(tokenizer, [entry.query])[0],
            "target": texts[at],
            "before": texts[:at],
            "after": texts[at + 1 :],
            "score": entry.score,
            "age": entry.age,
            "position": entry.position,
            "writers": entry.writers,
        }
    }


def _log_arrays(reader: TracingReader, lookahead: int) -> dict[str, np.ndarray]:
    arrays, tokens = {}, reader.tokens
    for layer, log in reader.logs.items():
        written = log.position >= 0
        for name, offset in (("query", 0), ("target", lookahead)):
            found = np.full(len(written), -1, np.int32)
            found[written] = tokens[log.position[written] + offset]
            arrays[f"{layer}_{name}"] = found
        arrays[f"{layer}_score"] = np.where(written, log.score, -1).astype(np.float32)
    return arrays


def _missing(subject: Subject, config: TraceConfig) -> str | None:
    has_slots = subject.model.config.fast_weight.rule.num_slots is not None
    if not subject.model.config.memory_layers or not has_slots:
        return "a fast-weight memory with slots"
    return missing_text(subject.text)


TRACE = Evaluation(
    name="trace",
    config=TraceConfig,
    evaluate=evaluate,
    limit="samples",
    title="What the memory held when it answered",
    about=(
        "One answer about a hidden sentence, slot by slot: which slots the memories read for each "
        "token of the answer, and which token was written there last. A hit is a slot that holds "
        "the right next token; where hits carry the weight, the answer came out of the memory."
    ),
    table=views.table,
    plot=views.plot,
    controls="none; it shows one answer",
    missing=_missing,
)
