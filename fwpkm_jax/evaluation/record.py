"""Results of evaluations: the numbers, their provenance, and the files that hold them."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fwpkm_jax.core.chunks import map_unshared
from fwpkm_jax.io.atomic import replacing, write_json
from fwpkm_jax.models.language_model import Memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Where the evaluated weights and texts come from."""

    run: str = ""
    """Run directory."""
    step: int = 0
    """Training step of the checkpoint."""
    fingerprint: str = ""
    """Fingerprint of the run's configuration."""
    weights: str = "trained"
    """Which slow weights of the checkpoint, see `fwpkm_jax.run.load.WhichWeights`."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """SHA-256 of every data file read, by path; empty for generated data."""
    tokenizer: str | None = None
    """The tokenizer's fingerprint; None for generated data."""


class Result(NamedTuple):
    """An evaluation's outcome."""

    record: dict[str, Any]
    """JSON values: `evaluation`, `provenance`, `config`, `results`."""
    arrays: dict[str, np.ndarray]
    """Per-token or per-answer data, too long for JSON."""


def first_group(memory: Memory) -> Memory:
    """The memory of a checkpoint's first group, leaves `[1, ...]`."""
    return map_unshared(lambda x: x[:1], memory)


def describe_resets(
    memory: Memory, *, fast_weights: str, queue: str, caches: str
) -> dict[str, Any]:
    """A record of which parts of the state are reset when; the evaluation uses memory group 0.

    Args:
      memory: the checkpoint's fast weights.
      fast_weights: when they are reset to the checkpoint's, such as "document" or "never".
      queue: when tokens that wait to be written are dropped.
      caches: when attention and GDN start empty.
    """
    return {
        "memory": fast_weights,
        "queue": queue,
        "attention_and_gdn": caches,
        "memory_group_used": 0 if memory else None,
    }


def make_result(
    evaluation: str, subject: Any, config: Any, outcome: Any, *, tokenizer: str | None
) -> Result:
    """A result with its provenance.

    Args:
      subject: what was evaluated, an `interface.Subject`.
      outcome: what the evaluation gave, an `interface.Outcome`.
      tokenizer: the tokenizer's fingerprint; None for generated data.

    Raises:
      ValueError: a number of the record is NaN or infinite.
    """
    origin = subject.origin
    model = subject.model if outcome.model is None else outcome.model
    yarn, own_chunks = model.config.attention.yarn, model.config.fast_weight.chunk_size
    leaves = jax.tree.leaves(subject.memory)
    rounded = subject.fast_weight_dtype == "bfloat16"
    dtype = "bfloat16" if rounded else str(leaves[0].dtype) if leaves else None
    provenance = {
        "checkpoint": {
            "run": origin.run,
            "step": origin.step,
            "fingerprint": origin.fingerprint,
            **({} if origin.weights == "trained" else {"weights": origin.weights}),
        },
        "data_files": {**origin.files, **outcome.files},
        "tokenizer": tokenizer,
        "chunk_size": own_chunks if outcome.chunk_size is None else outcome.chunk_size,
        "yarn": dataclasses.asdict(yarn) if yarn else None,
        "fast_weight_dtype": dtype if leaves else None,
        "memory_groups_in_checkpoint": leaves[0].shape[0] if leaves else 0,
        "resets": dict(outcome.resets),
        "mode": outcome.mode,
        "scored_tokens": outcome.scored_tokens,
        "seed": subject.seed,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    record = {
        "evaluation": evaluation,
        "provenance": provenance,
        "config": dataclasses.asdict(config),
        "results": dict(outcome.numbers),
    }
    # Through JSON and back: the caller sees exactly what the file will hold, and NaN is refused.
    try:
        record = json.loads(json.dumps(record, default=_json_value, allow_nan=False))
    except ValueError as error:
        raise ValueError(
            f"{evaluation}: a number of its results is not finite; evaluate an earlier checkpoint "
            "(--step)."
        ) from error
    return Result(record, dict(outcome.arrays))


def _json_value(value: Any) -> Any:
    """A value that JSON does not know: NumPy's numbers as numbers, such as paths as text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def save_result(result: Result, directory: Path) -> list[Path]:
    """Writes `<evaluation>.json`, and `<evaluation>.npz` if there are arrays; returns the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{result.record['evaluation']}.json"
    write_json(path, result.record)
    if not result.arrays:
        return [path]
    arrays = path.with_suffix(".npz")
    # Uncompressed: losses hardly compress, and compressing those of 8 million tokens takes long.
    with replacing(arrays) as file:
        np.savez(file, allow_pickle=False, **result.arrays)
    return [path, arrays]
