"""Whether a loss or an accuracy reads the logits at t-1 for the token at t.

A score is a function from a text and a position to what the score gives the token at that position:
its probability, or 1 if it counts as right and else 0.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from scipy.special import softmax

from fwpkm_jax.audit.design import Path
from fwpkm_jax.audit.lines import Line, judged
from fwpkm_jax.audit.paths import whole_pass
from fwpkm_jax.evaluation.interface import Subject
from fwpkm_jax.evaluation.readers.stream_reader import StreamReader
from fwpkm_jax.evaluation.recall import RECALL, RecallConfig
from fwpkm_jax.models.language_model import LanguageModel, Memory
from fwpkm_jax.training.state import MemoryConfig, TrainState
from fwpkm_jax.training.step import make_train_step
from fwpkm_jax.training.validation import make_validation

Score = Callable[[np.ndarray, int], float]
"""`score(tokens, position)`: of the token at `position` of `tokens` `[length]`."""

_ALL = 300
"""Vocabularies up to this size are tried whole."""
_SAMPLE = 24
"""Tokens of a larger vocabulary that are tried, beside the likeliest ones."""
_OFF = {-1: "two tokens before it, which leaves out the newest", 1: "at its own position"}


def reads_the_token_before(
    name: str,
    score: Score,
    logits: Path,
    tokens: np.ndarray,
    position: int,
    *,
    vocab_size: int,
    counts_right: bool = False,
    rounding: float = 1e-3,
) -> Line:
    """The line of a score: pass if it is what the logits before the position say.

    The token at the position is replaced by every id in turn. The scores of all must sum to 1: one
    that has seen the token gives each of them too much. They must equal those of the logits.

    Args:
      name: of the score.
      score: see `Score`.
      logits: the model's, a path that `causality` passes.
      tokens: ids `[length]`, with at least two before `position`.
      position: of the token that is scored, one that is not the last.
      vocab_size: number of ids; of many a sample is tried, whose scores sum to 1 at most.
      counts_right: whether the score counts right tokens instead of giving probabilities.
      rounding: of sum and scores.
    """
    if not 2 <= position < len(tokens) - 1:
        raise ValueError(f"position={position} must leave two tokens before it and one behind.")
    ids = np.arange(vocab_size)
    if vocab_size > _ALL:
        likely = np.argmax(logits(tokens[None])[0], axis=-1)
        drawn = np.random.default_rng(0).choice(vocab_size, _SAMPLE, replace=False)
        ids = np.unique(np.concatenate([likely, drawn]))
    given, own = np.zeros(len(ids)), np.zeros((len(ids), 3))
    for number, token in enumerate(ids):
        text = tokens.copy()
        text[position] = token
        given[number] = score(text, position)
        rows = logits(text[None])[0, position - 2 : position + 1].astype(np.float64)
        if counts_right:
            own[number] = np.argmax(rows, axis=-1) == token
        else:
            own[number] = softmax(rows, axis=-1)[:, token]
    total = float(given.sum())
    gaps = {offset: float(np.max(np.abs(given - own[:, 1 + offset]))) for offset in (0, -1, 1)}
    whole = len(ids) == vocab_size
    sums = abs(total - 1) <= rounding or (not whole and total <= 1 + rounding)
    fits = gaps[0] <= rounding
    if sums and fits:
        text = (
            f"It scores a token by the logits before it (within {gaps[0]:.1g}); the scores of "
            f"{'all' if whole else len(ids)} tokens sum to {total:.4g}."
        )
    else:
        nearest = min(gaps, key=lambda offset: gaps[offset])
        cause = "It matches the logits of no position near it."
        if nearest and gaps[nearest] <= rounding:
            cause = f"It reads the logits {_OFF[nearest]}: labels are shifted by one."
        text = f"The scores of {len(ids)} tokens for one place sum to {total:.4g}. {cause}"
    return Line(
        section="indices",
        name=name,
        verdict=judged(sums and fits),
        text=text,
        numbers={"sum": total, "largest_difference": gaps[0], "tokens_tried": len(ids)},
    )


def scores_of(subject: Subject) -> dict[str, tuple[Score, bool]]:
    """The project's losses and accuracies of a model, and whether each counts right tokens."""
    model, memory = subject.model, subject.first_memory
    return {
        "training loss": (_training(model, memory), False),
        "validation loss": (_validation(model, memory, "loss"), False),
        "evaluation loss": (_evaluation(model, memory), False),
        "validation accuracy": (_validation(model, memory, "answer_accuracy"), True),
        "recall": (_recall(model, memory), True),
    }


def indices(subject: Subject) -> Iterator[Line]:
    """The lines of all scores of the project."""
    vocab_size = subject.model.config.vocab_size
    rng = np.random.default_rng(subject.seed)
    tokens = rng.integers(vocab_size, size=8).astype(np.int32)
    logits = whole_pass(subject.model, subject.first_memory)
    rounding = 1e-3 if subject.model.config.activation_dtype == "float32" else 3e-2
    for name, (score, counts_right) in scores_of(subject).items():
        options = {"counts_right": counts_right, "rounding": rounding, "vocab_size": vocab_size}
        yield reads_the_token_before(name, score, logits, tokens, 5, **options)


def _batch(tokens: np.ndarray, position: int) -> dict[str, np.ndarray]:
    """A row as batches hold it, of which one label counts: that of the position."""
    weight = np.zeros((1, len(tokens) - 1), np.float32)
    weight[0, position - 1] = 1
    return {
        "tokens": tokens[None].astype(np.int32),
        "loss_weight": weight,
        "answer_distance": weight.astype(np.int32),
    }


def _training(model: LanguageModel, memory: Memory) -> Score:
    graphdef, params = nnx.split(model)
    setting = MemoryConfig(groups=1, lifetime="batch")
    optimizer = optax.set_to_zero()
    # Of the last norm alone, so that the backward pass is short.
    step = make_train_step(
        graphdef,
        optimizer,
        schedule=optax.constant_schedule(0.0),
        micro_batches=1,
        memory=setting,
        train=("final_norm/.*",),
    )

    def score(tokens: np.ndarray, position: int) -> float:
        batch = _batch(tokens, position)
        copies = jax.tree.map(jnp.copy, (params, memory))  # The step reuses their buffers.
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params=copies[0],
            opt_state=optimizer.init(()),
            memory=copies[1],
            rng=jax.random.key(0),
        )
        return float(np.exp(-float(step(state, batch)[1]["loss"])))

    return score


def _validation(model: LanguageModel, memory: Memory, metric: str) -> Score:
    batches = [_batch(np.zeros(3, np.int32), 1)]  # Replaced, so that all use one compiled pass.
    validate = make_validation(batches, memory=MemoryConfig(groups=1, lifetime="batch"))

    def score(tokens: np.ndarray, position: int) -> float:
        batches[0] = _batch(tokens, position)
        found = validate(model, memory)[metric]
        return float(np.exp(-found)) if metric == "loss" else found

    return score


def _evaluation(model: LanguageModel, memory: Memory) -> Score:
    reader: StreamReader | None = None

    def score(tokens: np.ndarray, position: int) -> float:
        nonlocal reader
        size = len(tokens) - 1
        if reader is None:
            reader = StreamReader(model, memory, write=True, piece_length=size)
        reader.reset_memory()
        losses = reader.read(tokens[:-1], tokens[1:]).losses()
        return float(np.exp(-losses[position - 1]))

    return score


def _recall(model: LanguageModel, memory: Memory) -> Score:
    def score(tokens: np.ndarray, position: int) -> float:
        result = RECALL.of_model(
            model,
            memory,
            config=RecallConfig(num_bins=1),
            batches=[_batch(tokens, position)],
            lifetime="batch",
            num_values=2,
        )
        return result.record["results"]["writing"]["all"]["accuracy"]

    return score
