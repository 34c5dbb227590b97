"""`train.py` with a fault in the second process.

    python -m tests.training.process_faults KIND ...

start: its data cannot be read
step: reading its third batch fails
nan: its third batch holds an infinite weight
"""

import sys

import jax
import numpy as np

from fwpkm_jax.cli.train_command import main
from fwpkm_jax.run import setup as parts

THIRD = 2


class Faulty:
    """Batches of which the third is missing or damaged."""

    def __init__(self, batches, kind):
        self._batches, self._kind, self._given = batches, kind, 0

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self._batches)
        self._given += 1
        if self._given > THIRD and self._kind == "step":
            raise OSError("the disk is gone")
        if self._given > THIRD and self._kind == "nan":
            batch["loss_weight"] = np.full_like(batch["loss_weight"], np.inf)
        return batch

    def __getattr__(self, name):
        return getattr(self._batches, name)


class FaultyDataset:
    """A data set that gives `Faulty` batches."""

    def __init__(self, dataset, kind):
        self._dataset, self._kind = dataset, kind

    def __iter__(self):
        return Faulty(iter(self._dataset), self._kind)


def install(kind):
    """Puts the fault into the training loop of the second process."""
    make_dataset = parts.make_dataset

    def make_faulty(config, *, split, **arguments):
        dataset = make_dataset(config, split=split, **arguments)
        if jax.process_index() != 1 or split != "train":
            return dataset
        if kind == "start":
            raise ValueError("there is no data here")
        return FaultyDataset(dataset, kind)

    parts.make_dataset = make_faulty


if __name__ == "__main__":
    install(sys.argv[1])
    sys.exit(main(sys.argv[2:], program="train.py"))
