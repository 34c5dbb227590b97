"""The audit of a model in PyTorch: its lines, and a folder of the transformers library."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fwpkm_jax.audit.asking import answers_to, is_written
from fwpkm_jax.audit.audit import Audit, AuditConfig
from fwpkm_jax.audit.isolation import forgotten
from fwpkm_jax.audit.lines import Line, attempt, refused, shown
from fwpkm_jax.audit.origin import origin_lines
from fwpkm_jax.audit.program import copied, program_lines
from fwpkm_jax.audit.questions import Questions, questions_of
from fwpkm_jax.audit.stability import long_text
from fwpkm_jax.audit.torch_program import (
    TorchMemoryProgram,
    TorchProgram,
    TorchState,
    program_of,
)
from fwpkm_jax.config_json import from_json
from fwpkm_jax.data import AbstractDataConfig, TextData, load_tokenizer, sample
from fwpkm_jax.data.tokenizers import BYTES
from fwpkm_jax.evaluation.recall import attention_reach
from fwpkm_jax.evaluation.sources import sha256
from fwpkm_jax.lazy_imports import import_extra
from fwpkm_jax.models.config import ModelConfig

_ROWS = 8
"""Texts that are read side by side for causality and isolation."""
_CHUNK = 64
"""Tokens per write of a model that does not say how many it has."""


class Loaded(NamedTuple):
    """A folder's model, text that it can be asked about, and where both come from."""

    model: Any
    data: TextData | None
    provenance: dict[str, Any]


def load_torch(folder: Path) -> Loaded:
    """The model of a folder that the transformers library loads, in float32; runs its programs.

    It is asked about this package's sample of text in the tokens of its tokenizer, or in bytes if
    it has none and room for them.

    Raises:
      FileNotFoundError: the folder holds no model.
      ImportError: torch or transformers is not installed.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json; name a model's folder.")
    torch, transformers = (
        import_extra(name, "Models in PyTorch are loaded", extra="peers")
        for name in ("torch", "transformers")
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    )
    names = ("tokenizer.json", "tokenizer.model")
    tokenizers = [str(folder / name) for name in names if (folder / name).is_file()]
    tokenizer = (tokenizers or [BYTES])[0]
    data = TextData(
        train_paths=(sample.TRAIN,), valid_paths=(sample.VALID,), length=256, tokenizer=tokenizer
    )
    fits = load_tokenizer(tokenizer).vocab_size <= model.config.vocab_size
    files = {path.name: sha256(path) for path in sorted(folder.glob("*")) if path.is_file()}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    provenance = {"folder": str(folder), "files": files, **versions}
    return Loaded(model, data if fits else None, provenance)


def audit_torch(
    model: Any,
    config: AuditConfig | None = None,
    *,
    name: str = "model",
    data: AbstractDataConfig | None = None,
    show: Callable[[Line], None] = lambda line: None,
) -> Audit:
    """The audit of a causal language model in PyTorch: causality, origin, isolation, a long text.

    Args:
      model: a model of the transformers library or of its kind, on any device, in float32. Of a
        model with memories of its own see `TorchMemoryProgram`; of any other one the lines that
        need a read without writing are skipped.
      config: how much is read; None: the defaults.
      name: of the model, in the records.
      data: text or facts that it was trained on, which say what it is asked; None: it is asked
        nothing.
      show: called with each line when it is ready.

    Raises:
      ImportError: torch is not installed.

    Example:
      >>> from fwpkm_jax.audit import audit_torch, failures
      >>> failures(audit_torch(model).lines)  # doctest: +SKIP
      []
    """
    config = config or AuditConfig()
    program, answers = program_of(model), []
    note = getattr(model.config, "fwpkm_jax", None)
    ours = None if note is None else from_json(note["model"], ModelConfig, path="fwpkm_jax.model")
    chunk = _CHUNK if ours is None else ours.fast_weight.chunk_size
    rng = np.random.default_rng(0)
    # Several chunks and a part of one.
    shape = _ROWS, max(96, 4 * chunk) + chunk // 2 + 3
    tokens = rng.integers(program.vocab_size, size=shape).astype(np.int32)

    def lines() -> Iterator[Line]:
        yield from torch_lines(program, tokens, chunk_sizes=[chunk])
        try:
            asked = questions_of(data, texts=config.texts, length=config.length, seed=0)
            answers.extend(
                answers_to(
                    program,
                    _conditions(program, asked),
                    asked,
                    run=name,
                    reach=None if ours is None else attention_reach(ours).stack,
                    is_written=lambda end, length: ours is None or is_written(ours, end, length),
                    data=data,
                )
            )
        except (NotImplementedError, ValueError, FileNotFoundError) as error:
            yield refused("origin", "questions", error)
        yield from origin_lines(answers)
        text = rng.integers(program.vocab_size, size=config.tokens + 1)
        finite, late = long_text(program, text.astype(np.int32), exact=program.exact)
        yield late
        yield finite

    return Audit(shown(lines(), show), answers)


def torch_lines(
    program: TorchProgram, tokens: np.ndarray, *, chunk_sizes: Sequence[int]
) -> Iterator[Line]:
    """`program_lines` of a model in PyTorch, and those of saved and deleted memories."""
    yield from program_lines(program, tokens, chunk_sizes=chunk_sizes, exact=program.exact)
    if isinstance(program, TorchMemoryProgram):
        for name, check in {"saved memory": _saved, "deleted memory": _deleted}.items():
            yield attempt("isolation", name, partial(check, program, tokens))


def _saved(program: TorchMemoryProgram, tokens: np.ndarray) -> Line:
    """A memory in a file is the memory; what is read meanwhile is not in it."""
    begin, read = _kept_and_more(program, tokens)
    with tempfile.TemporaryDirectory() as folder:
        program.model.load_memory(begin.begin)
        program.model.save_memory(Path(folder, "user.safetensors"))
        never, state = read(begin)
        further, _ = read(program.restart(state))
        program.model.load_memory(Path(folder, "user.safetensors"))
        back, _ = read(begin._replace(begin=program.model.memory_state()))
    return forgotten("saved memory", back, never, further, what="loading what was saved before,")


def _deleted(program: TorchMemoryProgram, tokens: np.ndarray) -> Line:
    """After `forget`, a new text begins as if no memory had ever been written or loaded."""
    new = program.start(*tokens.shape)
    begin, read = _kept_and_more(program, tokens)
    never, _ = read(new)
    further, _ = read(begin)
    back, _ = read(new)
    return forgotten("deleted memory", back, never, further, what="forgetting a loaded memory,")


def _kept_and_more(
    program: TorchMemoryProgram, tokens: np.ndarray
) -> tuple[TorchState, Callable[[TorchState], tuple[dict[str, Any], TorchState]]]:
    """The memories alone behind half of a text, and what reads the other half behind a state."""
    kept, more = np.array_split(tokens, 2, axis=1)
    _, state = program.read(program.start(*tokens.shape), kept, write=True)

    def read(state: TorchState) -> tuple[dict[str, Any], TorchState]:
        logits, state = program.read(state, more, write=True)
        return {"logits": logits, "memory": copied(program.memory(state))}, state

    return program.restart(state), read


def _conditions(program: TorchProgram, questions: Questions) -> Iterator[tuple[str, TorchState]]:
    """The state in which each condition asks; see `origin.Condition`."""

    def read(texts: np.ndarray, *, write: bool = True) -> TorchState:
        return program.read(program.start(*texts.shape), texts, write=write)[1]

    def without_reads(memories: list[Any]) -> list[Any]:
        for one in memories:
            one.values = one.values * 0
        return memories

    if not isinstance(program, TorchMemoryProgram):
        raise NotImplementedError("the model cannot be asked without its cache.")
    written = read(questions.texts)
    yield "written, caches kept", written
    yield "not stated", program.restart(read(questions.others))
    yield "written", program.restart(written)
    yield "reset", program.start(*questions.texts.shape)
    yield "other memory", program.changed(written, lambda memories: memories[-1:] + memories[:-1])
    yield "without reads", program.changed(written, without_reads)
    frozen = read(questions.texts, write=False)
    yield "frozen, caches kept", frozen
    yield "frozen", program.restart(frozen)
