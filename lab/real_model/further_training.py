"""Trains the memory of SmolLM2 further on a processor, in PyTorch, whose products are faster.

    python -m lab.real_model.further_training --sessions SESSIONS.npz --base BASE --out OUT

`training` does the same by the library on an accelerator. Here the layers under the memory, which
are frozen, are computed once for each session, the questions' row alone goes through the layers
above, and what a question reads is a sum over the slots that it shares with the statements, so that
no table is made (`peer_layer`). Before training, the first session's output is compared with the
library's. Needs torch, transformers and safetensors. OUT gets `memory.safetensors` and `log.jsonl`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.options import parse


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains on sessions."""

    sessions: tuple[Path, ...]
    """Files of `made_sessions`."""
    base: Path
    """Run of the model, by `fwpkm import gguf`."""
    out: Path
    """Folder for the trained weights and the log."""
    weights: Path | None = None
    """The memory's weights to begin with; None: the shipped ones."""
    minutes: float = 30.0
    """Training ends after so many, without the states of the first sessions."""
    batch: int = 16
    """Sessions of a step."""
    rate: float = 5e-4
    """Learning rate, which falls to a tenth in the last half."""
    rule: Literal["fwpkm", "sdm"] = "fwpkm"
    """fwpkm, or Sparse Delta Memory with the same maps: a token writes under the slots of the token
    before, as strongly as its gate is open, and nothing decays. The library ships the first."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the frozen layers' products. bfloat16 is the faster one where the processor multiplies it
    (12 times with AMX), and slower by far where it does not (60 times with AVX2)."""
    states: Path | None = None
    """Folder that keeps what the layers of `base` under the memory make of sessions, so that
    trainings on the same sessions compute it once (0.5 MB each); None: each for itself."""
    tests: tuple[Path, ...] = ()
    """Files of `made_sessions` that are asked at the end, written and not written."""
    seed: int = 0
    """Of the order of sessions."""


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and writes the average of the weights."""
    options = parse(Options, argv)
    from lab.real_model.peer_memory import train

    train(options)


if __name__ == "__main__":
    main()
