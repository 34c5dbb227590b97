"""Whether users stay apart, and whether what was forgotten is gone; for any program.

A use is a function that gives what one user has at the end: logits, answers, a memory, as a pytree
of arrays.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from fwpkm_jax import memories, overlays
from fwpkm_jax.audit.lines import Difference, Line, attempt, compare, judged
from fwpkm_jax.audit.paths import NEW, for_rows, probe, read_piece, split, start_stream, whole_pass
from fwpkm_jax.core.chunks import map_unshared
from fwpkm_jax.evaluation.interface import Subject
from fwpkm_jax.evaluation.readers.stream_reader import StreamReader
from fwpkm_jax.generation import GenerationState, generate, init_generation
from fwpkm_jax.models.language_model import LanguageModel, Memory

Beside = Callable[[np.ndarray, np.ndarray], Any]
"""`beside(mine, theirs)`: reads two users' texts `[length]`, and gives what the second one has."""


def apart(
    name: str, beside: Beside, mine: np.ndarray, theirs: np.ndarray, other: np.ndarray
) -> Line:
    """The line of two users: pass if what they have is the same beside any text of mine.

    Args:
      name: of the path.
      beside: see `Beside`.
      mine: text of the first user.
      theirs: text of the second user.
      other: another text, as long as both, in place of mine, and then of theirs, which must show.
    """
    first, second = beside(mine, theirs), beside(other, theirs)
    found = compare(second, first)
    blind = compare(beside(mine, other), first).same
    if not found.same:
        text = (
            f"Another text of one user changes the other's {found.where} by {found.largest:.2g}: "
            "the users share a memory, or a state."
        )
    elif blind:
        text = "A user's own text changes nothing that this check sees, so it cannot fail."
    else:
        text = "Another text of one user changes no bit of what the other has."
    return Line(
        section="isolation",
        name=name,
        verdict=judged(found.same and not blind),
        text=text,
        numbers=_numbers(found),
    )


def forgotten(name: str, back: Any, never: Any, further: Any, *, what: str) -> Line:
    """The line of a way back: pass if all is as if nothing more had ever been read.

    Args:
      name: of the way back.
      back: a pytree of arrays after going back.
      never: the same where nothing more was read.
      further: the same after reading more, which must differ.
      what: the way back, for the text.
    """
    found, control = compare(back, never), compare(further, never)
    if control.same:
        text = "Reading more changed nothing, so this check cannot fail."
    elif found.same:
        text = f"After {what} every bit is as if nothing more had been read."
    else:
        text = (
            f"After {what}, {found.where} still differs by {found.largest:.2g} from one that "
            "never read more: it is no reset."
        )
    return Line(
        section="isolation",
        name=name,
        verdict=judged(found.same and not control.same),
        text=text,
        numbers=_numbers(found),
    )


def isolation(subject: Subject) -> list[Line]:
    """The lines of users and of ways back."""
    model, memory = subject.model, subject.first_memory
    tokens = probe(model, memory, seed=subject.seed).tokens
    texts = np.concatenate([tokens[:2], tokens[:1] // 2 + tokens[1:2] // 2])
    rows = for_rows(memory, len(tokens))
    users = {
        "users in a batch": lambda: _rows(model, rows, tokens),
        "users in a stream": lambda: _streams(model, rows, tokens),
        "users in generation": lambda: _generations(model, rows, tokens),
        "users over one base": lambda: _over_one_base(model, memory, tokens),
    }
    lines: list[Line] = []
    for name, make in users.items():
        lines += attempt("isolation", name, lambda n=name, m=make: [apart(n, m(), *texts)])
    lines += attempt("isolation", "a user alone", lambda: [_alone(model, memory, tokens)])
    lines += attempt("isolation", "documents in a row", lambda: [_documents(model, memory, tokens)])
    lines += attempt("isolation", "restored memory", lambda: [_restored(model, memory, texts)])
    lines += attempt("isolation", "question aside", lambda: [_aside(model, memory, texts)])
    lines += attempt("isolation", "reset memory", lambda: [_reset(model, memory, texts)])
    lines += attempt("isolation", "emptied caches", lambda: [_emptied(model, memory, texts)])
    return lines


def _numbers(found: Difference) -> dict[str, Any]:
    largest = found.largest if np.isfinite(found.largest) else None
    return {"largest": largest, "where": found.where}


def _beside(tokens: np.ndarray, *texts: np.ndarray) -> np.ndarray:
    """The rows, the first of which are these texts."""
    return np.concatenate([np.stack(texts), tokens[len(texts) :]])


def _rows(model: LanguageModel, memory: Memory, tokens: np.ndarray) -> Beside:
    path = whole_pass(model, memory)
    return lambda mine, theirs: {"logits": path(_beside(tokens, mine, theirs))[1]}


def _streams(model: LanguageModel, memory: Memory, tokens: np.ndarray) -> Beside:
    graphdef, params = nnx.split(model)

    def beside(mine: np.ndarray, theirs: np.ndarray) -> Any:
        rows = _beside(tokens, mine, theirs)
        stream = start_stream(model, memory, rows)
        logits, stream = read_piece(graphdef, params, stream, rows)
        return {"logits": np.asarray(logits)[1], "memory": _user(stream.memory, 1)}

    return beside


def _generations(model: LanguageModel, memory: Memory, tokens: np.ndarray) -> Beside:
    def beside(mine: np.ndarray, theirs: np.ndarray) -> Any:
        rows = _beside(tokens, mine, theirs)
        length = rows.shape[1] + NEW
        state = init_generation(model, memory, batch=len(rows), max_length=length)
        out = generate(model, rows, state, max_new_tokens=NEW)
        return {
            "answer": np.asarray(out.tokens)[1],
            "log_probs": np.asarray(out.log_probs)[1],
            "memory": _user(out.state.stream.memory, 1),
        }

    return beside


def _over_one_base(model: LanguageModel, memory: Memory, tokens: np.ndarray) -> Beside:
    rule = model.config.fast_weight.rule
    if not memory or rule.num_slots is None:
        raise ValueError("users share a base of slots only.")
    forked = overlays.fork_memory(model, memory, users=len(tokens), capacity=rule.num_slots)
    return _generations(model, forked, tokens)


def _user(memory: Memory, number: int) -> Memory:
    """The memory of a user; of one over a base its whole table, whose rows may lie anywhere."""
    return map_unshared(lambda x: np.array(x[number]), overlays.to_private(memory))


def _alone(model: LanguageModel, memory: Memory, tokens: np.ndarray) -> Line:
    """A user alone gets what they get beside another one."""
    graphdef, params = nnx.split(model)
    pair = start_stream(model, for_rows(memory, len(tokens)), tokens)
    beside, _ = read_piece(graphdef, params, pair, tokens)
    stream = start_stream(model, for_rows(memory, 1), tokens[1:2])
    alone, _ = read_piece(graphdef, params, stream, tokens[1:2])
    found = compare({"logits": np.asarray(beside)[1]}, {"logits": np.asarray(alone)[0]})
    if found.same:
        text = "Logits beside another user equal those alone, bit for bit."
    else:
        text = (
            f"Logits beside another user and alone differ by up to {found.largest:.2g}: another "
            "batch size is another program, whose sums round otherwise."
        )
    return Line(
        section="isolation",
        name="a user alone",
        verdict="pass" if found.same else "told",
        text=text,
        numbers=_numbers(found),
    )


def _documents(model: LanguageModel, memory: Memory, tokens: np.ndarray) -> Line:
    """The second document of a row does not see the first, but by a memory that goes on."""
    whole = memory and model.config.fast_weight.documents != "document"
    path = whole_pass(model, for_rows(memory, len(tokens)), documents=True, write=not whole)
    cut = split(tokens)
    mixed = tokens.copy()
    mixed[:, :cut] = tokens[::-1, :cut]
    first, second = path(tokens)[:, cut:], path(mixed)[:, cut:]
    blind = compare(path(tokens[::-1]), path(tokens)).same
    found = compare({"logits": second}, {"logits": first})
    read = ", with writing disabled, as memories go on from document to document" if whole else ""
    if blind:
        text = "Another row changes no logits at all, so this check cannot fail."
    elif found.same:
        text = f"Another first document changes no bit of the second's logits{read}."
    else:
        text = (
            f"Another first document changes the second's logits by {found.largest:.2g}{read}: a "
            "document sees the one before it."
        )
    return Line(
        section="isolation",
        name="documents in a row",
        verdict=judged(found.same and not blind),
        text=text,
        numbers=_numbers(found),
    )


def _read(
    model: LanguageModel, memory: Memory, *texts: np.ndarray, room: int = NEW
) -> GenerationState:
    """The state of a user who has read these texts, with room for more tokens."""
    total = sum(map(len, texts)) + room
    state = init_generation(model, for_rows(memory, 1), batch=1, max_length=total)
    for text in texts:
        state = generate(model, [text], state, max_new_tokens=0).state
    return state


def _restored(model: LanguageModel, memory: Memory, texts: np.ndarray) -> Line:
    """A saved memory, a point, more text, and back: as if the text had never been read."""
    kept, more = texts[0], texts[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        memories.save(folder, "user", _read(model, memory, kept), model=model)
        memories.fork(folder, "user", "user@point")
        memories.save(folder, "user", _read(model, memory, kept, more), model=model)
        further = _bits(memories.load(folder, "user", model))
        memories.restore(folder, "user", "user@point")
        back = memories.load(folder, "user", model)
    # Also what they go on to say.
    never = _state_and_answer(model, _read(model, memory, kept))
    return forgotten(
        "restored memory",
        _state_and_answer(model, back),
        never,
        {**never, **further},
        what="a memory was restored to a point",
    )


def _copy(tree: Any) -> Any:
    """NumPy copies: on a CPU `np.asarray` would be a view of a buffer that a call may reuse."""
    return jax.tree.map(np.array, tree)


def _bits(state: GenerationState) -> dict[str, Any]:
    return {"memory": _copy(state.stream.memory), "logits": np.array(state.logits)}


def _state_and_answer(model: LanguageModel, state: GenerationState) -> dict[str, Any]:
    bits = _bits(state)
    out = generate(model, None, state, max_new_tokens=NEW)
    return bits | {"answer": np.asarray(out.tokens)}


def _aside(model: LanguageModel, memory: Memory, texts: np.ndarray) -> Line:
    """A question that is asked aside leaves no trace in state and memory."""
    kept, question = texts[0], texts[1][:8]
    state = _read(model, memory, kept, room=len(question) + NEW)
    never = _copy(state)
    out = generate(model, [question], state, max_new_tokens=NEW, write=False, keep_state=True)
    return forgotten(
        "question aside",
        _copy(state),
        never,
        _copy(out.state),
        what="a question aside",
    )


def _reset(model: LanguageModel, memory: Memory, texts: np.ndarray) -> Line:
    """A reader whose memory is reset reads a text as a new one does."""
    one, two = texts[0][:-1], texts[1]  # As long as what `two` is read for: one compilation.

    def new() -> StreamReader:
        return StreamReader(model, memory, write=True, piece_length=len(one))

    def losses(reader: StreamReader) -> dict[str, Any]:
        return {
            "losses": reader.read(two[:-1], two[1:]).losses(),
            "memory": _copy(reader.stream.memory),
        }

    reader = new()
    reader.read(one)
    further = losses(reader)
    reader.reset_memory()
    back = losses(reader)
    return forgotten("reset memory", back, losses(new()), further, what="a reset")


def _emptied(model: LanguageModel, memory: Memory, texts: np.ndarray) -> Line:
    """With writing disabled, a reader whose caches are emptied reads as a new one does."""
    one, two = texts[0][:-1], texts[1]

    def new() -> StreamReader:
        return StreamReader(
            model, memory, write=False, piece_length=len(one), max_length=3 * len(one)
        )

    def losses(reader: StreamReader) -> dict[str, Any]:
        return {"losses": reader.read(two[:-1], two[1:]).losses()}

    reader = new()
    reader.read(one)
    further = losses(reader)
    reader.restart(drop_queue=True)
    back = losses(reader)
    return forgotten("emptied caches", back, losses(new()), further, what="emptying all caches")
