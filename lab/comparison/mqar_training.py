"""Trains one decoder of `mqar_decoder.py`, and goes on where it stopped."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fwpkm_jax.io.atomic import replacing
from lab.comparison.mqar_decoder import Decoder, Frozen, Layout
from lab.comparison.mqar_tasks import Cell, Documents, Part, Split, documents
from lab.comparison.trainer import Progress, Trainer

WEIGHT_DECAY = 0.1
"""Of all weights, as PyTorch's AdamW has it."""
DROPOUT = 0.1
"""Of the embedded tokens."""


class Dropped(NamedTuple):
    """Documents, and which channels of their embedded tokens dropout keeps."""

    documents: Documents
    kept: jax.Array


class Training:
    """The compiled functions of one memory; learning rate and seed are arguments."""

    def __init__(
        self,
        name: str,
        layout: Layout,
        *,
        batch_size: int,
        rows: int,
        length: int,
        warmup: int = 0,
    ):
        """Compiles nothing yet.

        Args:
          name: the memory.
          layout: sizes.
          batch_size: documents per update.
          rows: documents computed at a time, whose gradients are summed to those of an update.
          length: number of learned positions, if there are any.
          warmup: updates over which the rate rises to its full size, linearly.

        Raises:
          ValueError: `rows` does not divide the batch.
        """
        if rows < 1 or batch_size % rows:
            raise ValueError(f"rows={rows} must divide batch_size={batch_size}.")
        self._rows, self._batch_size = rows, batch_size
        self._model = partial(Decoder, name, layout, length=length)
        # The head of a stacked task has the values alone.
        self._first_label = layout.vocabulary // 2 if layout.stacked else 0
        model = self._model(rngs=nnx.Rngs(0))
        self._graph, params, _ = nnx.split(model, nnx.Param, Frozen)
        self._memory = model.init_memory(jax.random.key(0))
        self._width = layout.width
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        optimizer = optax.chain(
            optax.scale_by_adam(),
            optax.add_decayed_weights(WEIGHT_DECAY),
            optax.scale_by_schedule(lambda step: -jnp.minimum(1.0, (step + 1) / max(warmup, 1))),
        )
        self._trainer = Trainer(self._loss, optimizer, rows=rows, draw=self._drop)
        self._right = jax.jit(self._count_right)

    def start(self, seed: int) -> tuple[Progress, Any]:
        """A seed's first weights, and its frozen ones."""
        _, params, frozen = nnx.split(self._model(rngs=nnx.Rngs(seed)), nnx.Param, Frozen)
        return self._trainer.start(params), frozen

    def _decoder(self, params: Any, frozen: Any) -> Decoder:
        return nnx.merge(self._graph, params, frozen)

    def blocks(self, parts: Sequence[Documents], pieces: int) -> list[list[Documents]]:
        """An epoch's batches in `pieces`, each a list of blocks `[updates, batch, ...]`.

        The parts follow one another, as published; a piece may end within one of them. The last
        documents of a part that do not fill a batch for each piece are left out.

        Raises:
          ValueError: a part has less than a batch for each piece.
        """
        found = []
        for part in parts:
            size = len(part.tokens) // pieces
            if size < self._batch_size:
                raise ValueError(
                    f"A part has {len(part.tokens)} documents for {pieces} validations an epoch, "
                    f"less than a batch of {self._batch_size} for each; lower batch_size or "
                    "validations, or raise documents."
                )
            updates = size // self._batch_size
            batches = _divided(part, pieces * updates, self._batch_size)
            found += [
                Documents(*(x[start : start + updates] for x in batches))
                for start in range(0, pieces * updates, updates)
            ]
        return [found[i : i + len(parts)] for i in range(0, len(found), len(parts))]

    def train(
        self, state: Progress, frozen: Any, blocks: Sequence[Documents], *, rate: float, seed: int
    ) -> tuple[Progress, float]:
        """Trains on blocks of batches at one learning rate; also the mean loss in nats."""
        state, losses = self._trainer.train(state, frozen, blocks, seed=seed, rate=rate)
        return state, float(np.mean(losses))

    def accuracy(self, params: Any, frozen: Any, part: Documents) -> float:
        """Share of right answers."""
        right = partial(self._right, params, frozen)
        blocks, rest = divmod(len(part.tokens), self._rows)
        found = 0
        if blocks:
            found += int(right(_divided(part, blocks, self._rows)))
        if rest:
            found += int(right(Documents(*(leaf[-rest:][None] for leaf in part))))
        return found / part.labels.size

    def _drop(self, batch: Documents, rng: jax.Array) -> Dropped:
        shape = (*batch.tokens.shape[:2], self._width)
        return Dropped(batch, jax.random.bernoulli(rng, 1 - DROPOUT, shape))

    def _loss(self, params: Any, frozen: Any, batch: Dropped) -> jax.Array:
        kept = batch.kept.astype(jnp.float32) / (1 - DROPOUT)
        logits = self._logits(self._decoder(params, frozen), batch.documents, kept)
        labels = batch.documents.labels - self._first_label
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    def _logits(self, model: Decoder, part: Documents, kept: jax.Array | None = None) -> jax.Array:
        tokens, positions = map(jnp.asarray, (part.tokens, part.positions))
        return model.logits(model(tokens, positions, self._memory, kept=kept))

    def _count_right(self, params: Any, frozen: Any, blocks: Documents) -> jax.Array:
        model = self._decoder(params, frozen)

        def right(part: Documents) -> jax.Array:
            logits = self._logits(model, part)
            return jnp.sum(jnp.argmax(logits, axis=-1) + self._first_label == part.labels)

        return jnp.sum(jax.lax.map(right, blocks))


def rate_in(epoch: int, epochs: int, rate: float) -> float:
    """The learning rate of an epoch: it falls from `rate` with a cosine, to 0 after `epochs`."""
    return rate * 0.5 * (1 + math.cos(math.pi * epoch / epochs))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: what is trained, and when it ends."""

    cell: Cell
    """Documents of training and test."""
    rate: float
    """Learning rate of the first epoch; it falls with a cosine, from epoch to epoch."""
    seed: int
    """Of weights and documents."""
    epochs: int
    """Passes over the documents after which the rate would be 0."""
    validations: int
    """Validations in an epoch; published is one."""
    threshold: float
    """Accuracy that ends the run, once two validations have reached it."""
    state: Path
    """File of the unfinished run."""

    def documents(self, parts: Sequence[Part], split: Split) -> list[Documents]:
        """The documents of a split; each part has its own."""
        return [
            documents(part.task, part.documents, split=split, seed=1000 * self.seed + index)
            for index, part in enumerate(parts)
        ]

    def train(self, training: Training) -> dict[str, Any]:
        """Trains from the start or from the last validation of an earlier call.

        Returns:
          `steps`; the last `loss`; `valid`, the best mean validation accuracy; `test`, accuracy by
          part, of the last weights; `curve`, at each validation the step, the mean loss since the
          one before and the accuracy; `cpu_seconds`. A loss that is not finite ends the run and is
          stored as None.
        """
        state, frozen = training.start(self.seed)
        curve: list[list[Any]] = []
        spent = 0.0
        if self.state.exists():
            state, curve, spent = _load(self.state, state)
        start = time.process_time() - spent
        blocks = training.blocks(self.documents(self.cell.train, "train"), self.validations)
        valid = self.documents(self.cell.test, "valid")
        for number in range(len(curve), self.epochs * self.validations):
            if self._ended(curve):
                break
            epoch, piece = divmod(number, self.validations)
            rate = rate_in(epoch, self.epochs, self.rate)
            state, loss = training.train(state, frozen, blocks[piece], rate=rate, seed=self.seed)
            right = [training.accuracy(state.params, frozen, part) for part in valid]
            finite = round(loss, 5) if math.isfinite(loss) else None
            curve.append([int(state.step), finite, round(float(np.mean(right)), 4)])
            _save(self.state, state, curve, time.process_time() - start)
            print("  step {}: loss {}, accuracy {}".format(*curve[-1]), flush=True)
        test = self.documents(self.cell.test, "test")
        test = [training.accuracy(state.params, frozen, part) for part in test]
        return {
            "steps": curve[-1][0],
            "loss": curve[-1][1],
            "valid": max(accuracy for _, _, accuracy in curve),
            "test": [
                {"pairs": part.task.pairs, "length": part.task.length, "accuracy": round(x, 4)}
                for part, x in zip(self.cell.test, test, strict=True)
            ],
            "curve": curve,
            "cpu_seconds": round(time.process_time() - start, 1),
        }

    def _ended(self, curve: Sequence[Sequence[Any]]) -> bool:
        reached = sum(accuracy >= self.threshold for _, _, accuracy in curve)
        return reached >= 2 or (bool(curve) and curve[-1][1] is None)


def _divided(part: Documents, blocks: int, size: int) -> Documents:
    """`blocks` of `size` documents, `[blocks, size, ...]`."""
    return Documents(*(x[: blocks * size].reshape(blocks, size, *x.shape[1:]) for x in part))


def _save(path: Path, state: Progress, curve: list[list[Any]], spent: float) -> None:
    about = json.dumps({"curve": curve, "spent": spent})
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        np.savez(file, np.asarray(about), *map(np.asarray, jax.tree.leaves(state)))


def _load(path: Path, like: Progress) -> tuple[Progress, list[list[Any]], float]:
    with np.load(path) as file:
        about = json.loads(str(file["arr_0"]))
        leaves, tree = jax.tree.flatten(like)
        found = [jnp.asarray(file[f"arr_{i}"]) for i in range(1, len(leaves) + 1)]
    return jax.tree.unflatten(tree, found), about["curve"], about["spent"]
