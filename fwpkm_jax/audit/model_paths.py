"""Causality of every path of a `LanguageModel`, and of a run's chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fwpkm_jax.audit.causality import Logits, Look, causality, look_ahead
from fwpkm_jax.audit.lines import Line, attempt, difference_of, judged
from fwpkm_jax.audit.paths import (
    Probe,
    for_rows,
    generation,
    probe,
    stream_in_pieces,
    whole_pass,
)
from fwpkm_jax.evaluation.interface import Subject
from fwpkm_jax.evaluation.reconfigure import without_memory_layers
from fwpkm_jax.generation.prompts import SHORT_PIECES
from fwpkm_jax.layers.partition import MeshConfig
from fwpkm_jax.models.language_model import LanguageModel, Memory
from fwpkm_jax.run.conversation import Conversation
from fwpkm_jax.run.load import Run
from fwpkm_jax.training.sharding import make_partition

Variant = Callable[[LanguageModel, Memory, bool], Logits]
"""A path of a model, its memory, and whether it is written."""

_MESSAGES = (
    "Call Mara at 4829.",
    "The secret number for ID-07ab is 193057.",
    "Whoever owns locker 9 opens it with the code 6418.",
    "It was a bright cold day.",
)
_ANSWER = 8  # Tokens of a chat's answer.


def model_causality(subject: Subject) -> list[Line]:
    """The lines of all paths from tokens to logits."""
    model, memory = subject.model, subject.first_memory
    vocab_size = model.config.vocab_size
    texts = probe(model, memory, seed=subject.seed)
    tokens, changed = texts.tokens, texts.changed
    lines: list[Line] = []
    for name, (variant, apart) in _variants(texts).items():

        def check(name: str = name, variant: Variant = variant, apart: bool = apart) -> list[Line]:
            return [
                causality(
                    name,
                    variant(model, memory, True),
                    tokens,
                    changed,
                    vocab_size=vocab_size,
                    rows_apart=apart and texts.apart,
                    cause=_cause(variant, model, memory, tokens),
                )
            ]

        lines += attempt("causality", name, check)
    if jax.device_count() == 1:
        lines.append(
            Line(
                section="causality",
                name="several devices",
                verdict="skipped",
                text=f"There is one device here ({jax.devices()[0].device_kind}).",
            )
        )
    return [
        *lines,
        *attempt("causality", "the paths agree", lambda: _agree(subject, tokens)),
    ]


def _variants(texts: Probe) -> dict[str, tuple[Variant, bool]]:
    """Every path by name, and whether no row sees another one."""

    def of_rows(path: Callable[..., Logits], **options: Any) -> tuple[Variant, bool]:
        def variant(model: LanguageModel, memory: Memory, write: bool) -> Logits:
            return lambda tokens: path(
                model, for_rows(memory, len(tokens)), write=write, **options
            )(tokens)

        return variant, True

    def shared(model: LanguageModel, memory: Memory, write: bool) -> Logits:
        return whole_pass(model, for_rows(memory, 1), write=write)

    length = texts.tokens.shape[1]
    ends = {end for place in texts.changed for end in (place, place + 1) if end < length}
    # Parts of a prompt that are padded to the shortest size compile one program.
    ends = sorted(ends | set(range(SHORT_PIECES[0], length, SHORT_PIECES[0])))
    found = {
        "whole pass": of_rows(whole_pass),
        "whole pass, rows that share a memory": (shared, False),
        "packed rows": of_rows(whole_pass, documents=True),
        "stream at once": of_rows(stream_in_pieces, piece=length),
        "stream in pieces": of_rows(stream_in_pieces, piece=length // 5),
        "cache, token by token": of_rows(stream_in_pieces, piece=1),
        "generation": of_rows(generation, ends=ends),
    }
    if jax.device_count() > 1:
        sequence = make_partition(MeshConfig(sequence=2), jax.devices()[:2])
        data = make_partition(MeshConfig(data=2), jax.devices()[:2])
        found["several devices, mesh.sequence=2"] = of_rows(whole_pass, partition=sequence)
        found["several devices, mesh.data=2"] = of_rows(whole_pass, partition=data)
    return found


def _cause(
    variant: Variant, model: LanguageModel, memory: Memory, tokens: np.ndarray
) -> Callable[[Look], str]:
    """Names which part of a model looks ahead, by taking parts out."""

    def looks(model: LanguageModel, memory: Memory, write: bool, position: int) -> bool:
        path = variant(model, memory, write)
        vocab_size = model.config.vocab_size
        (look,) = look_ahead(path, tokens, [position], vocab_size=vocab_size)
        return look.back > 0

    def cause(look: Look) -> str:
        bare = without_memory_layers(model) if memory else model
        if looks(bare, {}, False, look.position):
            return "It does so without any memory layer: attention or another mixer sees ahead."
        if looks(model, memory, False, look.position):
            return "It does so with writing disabled: the memory's read sees ahead."
        return "It does so only while writing: a chunk reads its own write, or a later one."

    return cause


def _agree(subject: Subject, tokens: np.ndarray) -> list[Line]:
    """The paths give the same logits, so that what holds for one is said of all."""
    model, memory = subject.model, for_rows(subject.first_memory, len(tokens))
    length = tokens.shape[1]
    once = stream_in_pieces(model, memory, piece=length)(tokens)
    half = length // 2 - 1
    generated = generation(model, memory, ends=[half + 1])(tokens)[:, [half, -1]]
    frozen = stream_in_pieces(model, memory, piece=length, write=False)(tokens)
    found = {
        name: difference_of(stream_in_pieces(model, memory, piece=piece)(tokens), once)
        for name, piece in (("stream in pieces", length // 5), ("cache, token by token", 1))
    }
    found["generation"] = difference_of(generated, once[:, [half, -1]])
    whole = whole_pass(model, memory, write=False)(tokens)
    found["whole pass, frozen"] = difference_of(whole, frozen)
    spread = float(np.std(once))
    allowed = 1e-3 * max(1.0, spread) if model.config.activation_dtype == "float32" else spread / 8
    worst = max(found, key=lambda name: found[name])
    good = found[worst] <= allowed
    text = (
        f"Logits of pieces, single tokens and generation equal those of one call within "
        f"{found[worst]:.1g} (allowed {allowed:.1g})."
        if good
        else f"{worst} gives logits that differ by {found[worst]:.2g} from those of one call "
        f"(allowed {allowed:.1g}): it reads something else, or in another order."
    )
    return [
        Line(
            section="causality",
            name="the paths agree",
            verdict=judged(good),
            text=text,
            numbers={"largest": found, "rounding": allowed},
        )
    ]


def chat_causality(run: Run) -> Line:
    """The line of a conversation: a later message moves no earlier answer.

    Here a token is a whole message, and the logits are those behind each answer.
    """

    def path(messages: np.ndarray) -> np.ndarray:
        talk = Conversation(run)
        found = []
        for number in messages[0]:
            list(talk.reply(_MESSAGES[number], max_new_tokens=_ANSWER))
            found.append(np.asarray(talk.state.logits))
        return np.stack(found, axis=1)

    return causality(
        "chat",
        path,
        np.array([[0, 1, 2]], np.int32),
        [1, 2],
        vocab_size=len(_MESSAGES),
        cause=lambda look: "A conversation keeps something of another one.",
    )
