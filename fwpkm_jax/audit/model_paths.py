"""Causality and separation of every path of a `LanguageModel`, and of a run's chat."""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path as Folder
from typing import Any

import jax
import numpy as np

from fwpkm_jax import memories, overlays
from fwpkm_jax.audit.causality import Look, causality, look_ahead
from fwpkm_jax.audit.design import Path, boundaries
from fwpkm_jax.audit.isolation import forgotten
from fwpkm_jax.audit.lines import Line, attempt, refused
from fwpkm_jax.audit.paths import (
    NEW,
    ModelProgram,
    Probe,
    chunk_sizes,
    for_rows,
    generation,
    probe,
    whole_pass,
)
from fwpkm_jax.audit.program import (
    MOST_CALLS,
    Way,
    agree,
    copied,
    in_pieces,
    program_lines,
    way_lines,
)
from fwpkm_jax.evaluation.interface import Subject
from fwpkm_jax.evaluation.reconfigure import without_memory_layers
from fwpkm_jax.generation import GenerationState, generate, init_generation
from fwpkm_jax.layers.partition import MeshConfig
from fwpkm_jax.run.conversation import Conversation
from fwpkm_jax.run.load import Run
from fwpkm_jax.training.sharding import make_partition

_MESSAGES = (
    "Call Mara at 4829.",
    "The secret number for ID-07ab is 193057.",
    "Whoever owns locker 9 opens it with the code 6418.",
    "It was a bright cold day.",
)
_ANSWER = 8  # Tokens of a chat's answer.
_SHARING = 2  # Rows that share a memory.
_AGREEMENT = {"float32": 1e-3, "bfloat16": 1 / 8}
"""Share of the spread of logits by which paths may differ that compute in another order."""


def model_lines(subject: Subject) -> Iterator[Line]:
    """The lines of all paths from tokens to logits, and of ways back."""
    program = ModelProgram(subject.model, subject.first_memory)
    allowed = _AGREEMENT[subject.model.config.activation_dtype]
    row_length = None if subject.data is None else subject.data.length
    texts = probe(subject.model, program.initial, seed=subject.seed, row_length=row_length)
    tokens, rounding = texts.tokens, program.rounding

    def cause(way: Way) -> Callable[[Look], str]:
        return _cause(way, program, tokens)

    yield from way_lines(program, _ways(program, texts), tokens, cause=cause, rounding=rounding)
    if jax.device_count() == 1:
        kind = jax.devices()[0].device_kind
        yield refused("causality", "several devices", f"There is one device here ({kind}).")
    yield from program_lines(
        program,
        tokens,
        chunk_sizes=chunk_sizes(subject.model),
        cause=cause,
        agreement=allowed,
        rounding=rounding,
    )
    name = "paths agree"
    yield attempt("causality", name, lambda: _agree(program, tokens, allowed))
    yield attempt("isolation", "restored memory", lambda: _restored(program, tokens))


def _ways(program: ModelProgram, texts: Probe) -> dict[str, Way]:
    """Every way beside the streams of `program_lines`."""
    (rows, length), every = texts.tokens.shape, texts.changed
    numbers = np.arange(rows)
    # Rows that share a memory are changed together: half as many positions for a call.
    half = boundaries(length, chunk_sizes(program.model), most=MOST_CALLS * rows // _SHARING)
    ids = _documents(rows, length)
    # A memory may go on from document to document; without writing they must be apart.
    goes_on = bool(program.initial) and program.model.config.fast_weight.documents != "document"
    documents = np.where(ids > 0, numbers[:, None] * 3 + ids - 1, -1)
    padding = _padding(rows, length)
    mask = (padding >= 0).astype(np.float32)

    def whole(memories: int = rows, **options: Any) -> Callable[[ModelProgram], Path]:
        def way(one: ModelProgram) -> Path:
            settings: dict[str, Any] = {"write": one.writes, **options}
            return whole_pass(one.model, for_rows(one.initial, memories), **settings)

        return way

    def padded(one: ModelProgram) -> Path:
        def path(tokens: np.ndarray) -> dict[str, Any]:
            logits, state = one.read(one.start(rows, length), tokens, write=True, mask=mask)
            return {"logits": logits, "memory": copied(one.memory(state))}

        return path

    found = {
        "whole pass": Way(whole(), every),
        "whole pass, rows that share a memory": Way(
            whole(rows // _SHARING), half, together=_SHARING
        ),
        "packed rows": Way(whole(segment_ids=ids), every),
        "documents in a row": Way(
            whole(segment_ids=ids, **({"write": False} if goes_on else {})), owners=documents
        ),
        "padded rows": Way(whole(mask=mask), owners=padding),
        "padded stream": Way(padded, owners=padding),
        "generation": Way(lambda one: generation(one.model, for_rows(one.initial, rows))),
        "users over one base": Way(partial(_over_one_base, rows=rows)),
    }
    if jax.device_count() > 1:
        for axis, mesh in {"sequence": MeshConfig(sequence=2), "data": MeshConfig(data=2)}.items():
            partition = make_partition(mesh, jax.devices()[:2])
            found[f"several devices, mesh.{axis}=2"] = Way(whole(partition=partition), every)
    return found


def _documents(rows: int, length: int) -> np.ndarray:
    """Documents 1 to 3 of each row, whose edges lie elsewhere in each, and padding behind them."""
    numbers, places = np.arange(rows)[:, None], np.arange(length)
    first = length // 4 + numbers % (length // 4)
    second = length // 2 + 1 + 2 * numbers % (length // 3)
    ids = 1 + (places >= first).astype(np.int32) + (places >= second)
    return np.where(places >= length - numbers % 4, 0, ids)


def _padding(rows: int, length: int) -> np.ndarray:
    """The row of each token, -1 for padding before and behind its text."""
    numbers, places = np.arange(rows)[:, None], np.arange(length)
    real = (places >= numbers * (length // 2) // rows) & (places < length - numbers % 4)
    return np.where(real, numbers, -1)


def _over_one_base(program: ModelProgram, *, rows: int) -> Path:
    rule = program.model.config.fast_weight.rule
    if not program.initial or rule.num_slots is None:
        raise ValueError("users share a base of slots only.")
    forked = overlays.fork_memory(
        program.model, program.initial, users=rows, capacity=rule.num_slots
    )
    return generation(program.model, forked)


def _cause(way: Way, program: ModelProgram, tokens: np.ndarray) -> Callable[[Look], str]:
    """Names which part of a model looks ahead, by taking parts out."""

    def looks(one: ModelProgram, position: int) -> bool:
        (look,), _ = look_ahead(
            *(way.path(one), tokens[: way.rows], [position]), vocab_size=one.vocab_size
        )
        return look.back > 0

    def cause(look: Look) -> str:
        bare = without_memory_layers(program.model) if program.initial else program.model
        if looks(ModelProgram(bare, {}), look.position):
            return "It does so without any memory layer: attention or another mixer sees ahead."
        if looks(ModelProgram(program.model, program.initial, writes=False), look.position):
            return "It does so with writing disabled: the memory's read sees ahead."
        return "It does so only while writing: a chunk reads its own write, or a later one."

    return cause


def _agree(program: ModelProgram, tokens: np.ndarray, allowed: float) -> Line:
    """Other paths give the streams' logits, so that what holds for one is said of all."""
    rows, length = tokens.shape
    start = for_rows(program.initial, rows)
    once = in_pieces(program, piece=length)(tokens)["logits"]
    generated = generation(program.model, start)(tokens)["logits"]
    ends = [length // 2 - 1, length - 1]
    frozen = in_pieces(ModelProgram(program.model, program.initial, writes=False), piece=length)(
        tokens
    )
    return agree(
        "paths agree",
        {
            "generation": (generated[:, ends], once[:, ends]),
            "whole pass, frozen": (
                whole_pass(program.model, start, write=False)(tokens),
                frozen["logits"],
            ),
        },
        allowed=allowed,
    )


def _generated(program: ModelProgram, *texts: np.ndarray, room: int = NEW) -> GenerationState:
    """The state of a user who has read these texts, with room for more tokens."""
    total = sum(map(len, texts)) + room
    state = init_generation(program.model, for_rows(program.initial, 1), batch=1, max_length=total)
    for text in texts:
        state = generate(program.model, [text], state, max_new_tokens=0).state
    return state


def _state_and_answer(program: ModelProgram, state: GenerationState) -> dict[str, Any]:
    """What a user has, and what they go on to say; uses up the state."""
    bits = copied({"memory": state.stream.memory, "logits": state.logits})
    out = generate(program.model, None, state, max_new_tokens=NEW)
    return bits | {"answer": np.array(out.tokens)}


def _restored(program: ModelProgram, tokens: np.ndarray) -> Line:
    """A question aside, a point, more text, and back: as if none of it had ever been read."""
    model, (kept, more) = program.model, tokens[:2]
    asked = _generated(program, kept, room=len(more) + NEW)
    generate(model, [more], asked, max_new_tokens=NEW, write=False, keep_state=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Folder(name)
        memories.save(folder, "user", asked, model=model)
        memories.fork(folder, "user", "user@point")
        memories.save(folder, "user", _generated(program, kept, more), model=model)
        further = _state_and_answer(program, memories.load(folder, "user", model))
        memories.restore(folder, "user", "user@point")
        back = _state_and_answer(program, memories.load(folder, "user", model))
    never = _state_and_answer(program, _generated(program, kept))
    what = "a question aside, and a memory that was restored to a point,"
    return forgotten("restored memory", back, never, further, what=what)


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
