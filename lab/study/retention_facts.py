"""How many facts told in text are still known after other text, and after other facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.data import TextData, Tokenizer, needle_question
from fwpkm_jax.evaluation import NeedleConfig
from fwpkm_jax.evaluation.needle.samples import NeedleSample, take_samples
from fwpkm_jax.evaluation.needle.scores import score_answers
from fwpkm_jax.evaluation.sources import text_sources, texts_of
from fwpkm_jax.generation import GenerationState, generate, init_generation
from fwpkm_jax.models.language_model import LanguageModel, Memory
from fwpkm_jax.models.outputs import Stream


@dataclass(frozen=True, kw_only=True)
class FactsPlan:
    """Who is told what, and what follows."""

    people: int
    """Memories side by side, each told facts of its own: five needles of a haystack."""
    words: int
    """Words of a haystack."""
    readings: int
    """How often a haystack is read."""
    pieces: tuple[int, ...]
    """Numbers of pieces of other text after which the facts are asked for, increasing."""
    other_facts: int
    """Haystacks with other facts, read once each, after which the facts are asked for."""
    length: int
    """Tokens of a piece of other text."""
    seed: int
    """Seed of the facts."""


class FactsTexts(NamedTuple):
    """What is read and asked; the same for every model and way to write.

    Attributes:
      told: the haystack of each person, read first.
      other: `[other_facts][people]`, haystacks with facts that are never asked for.
      new: the haystack of each person that is read last.
      later: `[pieces, people, length]`, tokens of documents that no haystack is from.
    """

    told: list[NeedleSample]
    other: list[list[NeedleSample]]
    new: list[NeedleSample]
    later: np.ndarray


class FactsRead(NamedTuple):
    """What each text leaves to be written, after it was read from the start of a row.

    Attributes:
      told, other, new, later: as in `FactsTexts`, each as `read_to_write` gives it.
    """

    told: Any
    other: list[Any]
    new: Any
    later: list[Any]


def facts_texts(data: TextData, tokenizer: Tokenizer, plan: FactsPlan) -> FactsTexts:
    """The texts from a run's validation text.

    Raises:
      ValueError: there is too little text.
    """
    texts = list(texts_of(text_sources(data), tokenizer))
    rounds, people = plan.other_facts + 2, plan.people
    config = NeedleConfig(haystack_words=(plan.words,), samples=rounds * people)
    samples = take_samples(texts, config, words=plan.words, seed=plan.seed)
    used = {sample.document for sample in samples}
    others = [tokenizer.encode(text) for document, text in texts if document not in used]
    tokens = np.concatenate(others) if others else np.zeros(0, np.int32)
    shape = (max(plan.pieces), people, plan.length)
    if len(samples) < rounds * people or len(tokens) < np.prod(shape):
        raise ValueError(
            f"The text has {len(samples)} haystacks and {len(tokens)} tokens of other documents, "
            f"not {rounds * people} and {np.prod(shape)}; lower people, pieces or other_facts."
        )
    told, *other, new = (
        samples[start : start + people] for start in range(0, len(samples), people)
    )
    return FactsTexts(told, other, new, tokens[: np.prod(shape)].reshape(shape))


def read_facts(
    model: LanguageModel, memory: Memory, texts: FactsTexts, tokenizer: Tokenizer
) -> FactsRead:
    """Reads every text once, for all ways to write.

    Raises:
      ValueError: the model has several memory layers.
    """
    if len(model.config.memory_layers) != 1:
        raise ValueError(
            f"memory_layers={model.config.memory_layers}: what the upper ones write depends on "
            "what the lower ones hold; give runs with one."
        )
    people = len(texts.told)
    memory = jax.tree.map(lambda x: jnp.repeat(x[:1], people, axis=0), without_history(memory))

    def encoded(samples: Sequence[NeedleSample]) -> list[np.ndarray]:
        return [tokenizer.encode(sample.haystack) for sample in samples]

    haystacks = [encoded(each) for each in (texts.told, *texts.other, texts.new)]
    longest = max(texts.later.shape[2], *(len(text) for each in haystacks for text in each))

    read = partial(read_to_write, model, memory, longest)
    told, *other, new = (read(haystack) for haystack in haystacks)
    return FactsRead(told, other, new, [read(piece) for piece in texts.later])


def facts_kept(
    reader: LanguageModel,
    writer: LanguageModel,
    memory: Memory,
    texts: FactsTexts,
    read: FactsRead,
    tokenizer: Tokenizer,
    plan: FactsPlan,
) -> dict[str, Any]:
    """Shares of right answers and digits before and after other text and other facts.

    Each reading of a haystack and each piece of text is one write, at its end, as in the needle
    evaluation's mode `paper`. Questions are not written.

    Args:
      reader: the model with the plain write, which answers; of exact stores the writer.
      writer: the model with the write that is measured.
      memory: what that write starts from, leaves `[groups, ...]`; every person has a copy of the
        first group.
      texts: from `facts_texts`.
      read: from `read_facts`.
      tokenizer: the model's.
      plan: the sizes.

    Returns:
      By moment, the result of `ask`: `told_1` and `told` after one reading and after
      all, `text_N` after N pieces of other text, `facts_N` after N haystacks with other facts
      instead, and `new_1` and `new` of facts that are told after all the text.
    """
    people = jax.tree.map(lambda x: jnp.repeat(x[:1], plan.people, axis=0), memory)
    write = partial(write_facts, writer)
    found: dict[str, dict[str, Any]] = {}

    def asked(name: str, memory: Memory, samples: Sequence[NeedleSample]) -> None:
        state = opened(reader, without_history(memory), plan.length)
        found[name] = ask(reader, state, samples, tokenizer)

    def tell(memory: Memory, layers: Any, samples: Sequence[NeedleSample], name: str) -> Memory:
        for reading in range(plan.readings):
            memory = write(memory, layers)
            if reading == 0:
                asked(f"{name}_1", memory, samples)
        asked(name, memory, samples)
        return memory

    told = memory = tell(people, read.told, texts.told, "told")
    for number, layers in enumerate(read.later, 1):
        memory = write(memory, layers)
        if number in plan.pieces:
            asked(f"text_{number}", memory, texts.told)
    tell(memory, read.new, texts.new, "new")
    for layers in read.other:
        told = write(told, layers)
    asked(f"facts_{plan.other_facts}", told, texts.told)
    return found


def ask(
    model: LanguageModel,
    state: GenerationState,
    samples: Sequence[NeedleSample],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Asks each person for each fact, from the same state and without writing.

    Returns:
      The share of `exact` answers with Wilson's `interval`, the mean number of right `digits`, and
      how many answers of each person are `right`.
    """
    asked, answers = [], []
    for target in range(len(samples[0].needles)):
        needles = [sample.needles[target] for sample in samples]
        asked += [
            sample._replace(target=target, answer=needle.value)
            for sample, needle in zip(samples, needles, strict=True)
        ]
        questions = [tokenizer.encode(f" {needle_question(needle.key)}") for needle in needles]
        options = {"max_new_tokens": len(needles[0].value), "write": False, "keep_state": True}
        tokens = generate(model, questions, state, **options).tokens
        answers += [tokenizer.decode(one) for one in np.asarray(tokens)]
    scores = score_answers(asked, answers)
    exact = np.asarray([record["exact"] for record in scores["samples"]])
    return {
        "questions": scores["exact"]["answers"],
        "exact": round(scores["exact"]["accuracy"], 4),
        "interval": [round(bound, 4) for bound in scores["exact"]["interval"]],
        "digits": round(scores["digits"], 3),
        "right": exact.reshape(-1, len(samples)).sum(axis=0).tolist(),
    }


def without_history(memory: Memory) -> Memory:
    """The memory as the plain write has it; an exact store as it is."""
    return {
        layer: one._replace(history=None) if hasattr(one, "history") else one
        for layer, one in memory.items()
    }


def opened(model: LanguageModel, memory: Memory, longest: int) -> Any:
    """The state before the first token of as many sequences as there are memories."""
    groups = jax.tree.leaves(memory)[0].shape[0]
    sizes: dict[str, int] = {"max_length": longest, "max_chunk_size": longest}
    return init_generation(model, memory, batch=groups, **sizes)


def read_to_write(
    model: LanguageModel, memory: Memory, longest: int, texts: Sequence[np.ndarray]
) -> Any:
    """What `write_facts` takes, after each memory read a text of at most `longest` tokens.

    With one memory layer, what a token writes (query, target and gate) comes from the layers below
    it and does not depend on the memory. These are the stream's layers with all tokens waiting;
    where tokens read their own writes, the texts.
    """
    if model.config.fast_weight.rule.reads_own_writes:
        return texts
    state = opened(model, memory, longest)
    state = generate(model, list(texts), state, max_new_tokens=0, chunk_size="flush").state
    return state.stream.layers


def write_facts(model: LanguageModel, memory: Memory, read: Any) -> Memory:
    """The memory after one write of each person's text; `read` is of `read_to_write`."""
    if not model.config.fast_weight.rule.reads_own_writes:
        return _write_waiting(*nnx.split(model), memory, read)
    state = opened(model, memory, max(map(len, read)))
    return generate(model, list(read), state, max_new_tokens=0).state.stream.memory


@partial(jax.jit, static_argnames="graphdef")
def _write_waiting(graphdef: Any, params: Any, memory: Memory, layers: Any) -> Memory:
    model = nnx.merge(graphdef, params)
    return model.flush(Stream(memory, layers)).memory
