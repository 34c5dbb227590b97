"""Trains decoders with some 10,000 parameters on generated tasks and stores their results."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.models.language_model import LanguageModel, ModelConfig
from fwpkm_jax.rules.matrix import MATRIX_RULES
from fwpkm_jax.training.losses import weighted_loss
from fwpkm_jax.training.optimizer import OptimizerConfig, make_optimizer
from fwpkm_jax.training.state import MemoryConfig, init_state, model_graph
from lab.comparison.trainer import Trainer, stacked

Batch = Mapping[str, np.ndarray]
"""`tokens` and `labels` int32 `[batch, length]`, `weights` float32 `[batch, length]`."""
Row = dict[str, Any]

NO_DECAY = 6.0
"""A decay's bias, or minus the logarithm of its rate: each token loses less than 1/400."""

CURVE = 20
"""Points of a stored curve of the loss."""

# Each sequence has its own memory, which starts from the initial one in every batch.
_MEMORY = MemoryConfig(lifetime="batch")


class Training:
    """Trains one decoder from several seeds with one compiled function."""

    def __init__(
        self, config: ModelConfig, *, learning_rate: float, steps: int, weight_decay: float = 0.01
    ):
        self.config, self.steps = config, steps
        optimizer = OptimizerConfig(
            learning_rate=learning_rate,
            warmup_steps=min(50, steps // 4),
            weight_decay=weight_decay,
        )
        graphdef = model_graph(config)

        def logits(params: Any, memory: Any, tokens: jax.Array) -> jax.Array:
            own = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(tokens), *x.shape[1:])), memory)
            return nnx.merge(graphdef, params)(tokens, own).logits

        def loss(params: Any, memory: Any, batch: Batch) -> jax.Array:
            total = weighted_loss(
                logits(params, memory, jnp.asarray(batch["tokens"])),
                jnp.asarray(batch["labels"]),
                jnp.asarray(batch["weights"]),
            )
            return total / jnp.sum(batch["weights"])

        @jax.jit
        def right(params: Any, memory: Any, batch: Batch) -> jax.Array:
            tokens, labels = jnp.asarray(batch["tokens"]), jnp.asarray(batch["labels"])
            return jnp.argmax(logits(params, memory, tokens), axis=-1) == labels

        self._trainer = Trainer(loss, make_optimizer(optimizer, steps=steps))
        self._right = right

    def train(
        self,
        batches: Iterable[Batch],
        *,
        seed: int,
        prepare: Callable[[Any, ModelConfig], Any] = lambda params, _: params,
    ) -> "Trained":
        """Trains the decoder of one seed; `prepare` changes its initial parameters."""
        start = init_state(self.config, memory=_MEMORY, optimizer=None, seed=seed)
        state = self._trainer.start(prepare(start.params, self.config))
        every = max(1, self.steps // CURVE)
        blocks = stacked((dict(batch) for batch in batches), every)
        state, losses = self._trainer.train(state, start.memory, blocks, seed=seed)
        curve = [float(np.mean(losses[i : i + every])) for i in range(0, len(losses), every)]
        final = float(np.mean(losses[-20:]))
        right = partial(self._right, state.params, start.memory)
        return Trained(right, final, curve, _count(state.params))


@dataclass(frozen=True)
class Trained:
    """A trained decoder."""

    right: Callable[[Batch], jax.Array]
    """Whether each label `[batch, length]` of a batch is its most likely token."""
    loss: float
    """Mean of the last 20 steps, nats per answer."""
    curve: list[float]
    """Means of the loss over some `CURVE` equal parts of the training, in order."""
    parameters: int
    """Number of slow weights."""


def without_decay(params: Any, config: ModelConfig) -> Any:
    """Changes the initial parameters so that learned decays of matrix memories are close to none.

    With the usual initial decays little of a write is left after 100 tokens, and a few hundred
    training steps do not change that.
    """
    for name, block in zip(config.mixers, params["blocks"].values(), strict=True):
        if name not in MATRIX_RULES:
            continue
        mixer = block["mixer"]
        if "log_rate" in mixer:
            mixer["log_rate"][...] = jnp.full_like(mixer["log_rate"][...], -NO_DECAY)
        elif "decay_proj" in mixer:
            last = mixer["decay_proj"]
            last = last["layers"][1] if "layers" in last else last
            last["bias"][...] = jnp.full_like(last["bias"][...], NO_DECAY)
    return params


def state_bytes(config: ModelConfig) -> int:
    """Bytes that the last layer's memory keeps of one sequence, without a convolution's inputs.

    Args:
      config: float32 decoder whose last layer is a matrix memory, or has a memory layer.
    """

    def memory() -> Any:
        model = LanguageModel(config, rngs=nnx.Rngs(0))
        if config.memory_layers:
            return model.init_memory(jax.random.key(0))[f"layer_{config.memory_layers[-1]}"]
        mixer = model.blocks[-1].mixer
        return mixer.init_cache(1, max_length=1, dtype=jnp.float32).memory

    leaves = jax.tree.leaves(jax.eval_shape(memory))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


class Lines:
    """Rows of a file with one JSON object a line; a second call continues after the first."""

    def __init__(self, path: Path):
        """Reads the file if it exists."""
        self.path = path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self.rows: list[Row] = [json.loads(line) for line in text.splitlines()]

    def find(self, **names: Any) -> list[Row]:
        """Rows with these entries."""
        return [row for row in self.rows if all(row.get(k) == v for k, v in names.items())]

    def add(self, row: Row) -> None:
        """Appends a row to the file.

        Raises:
          ValueError: there is a NaN or an infinity in it.
        """
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")


def cpu_seconds(since: float = 0.0) -> float:
    """CPU time of this process in seconds, since an earlier reading."""
    return round(time.process_time() - since, 2)


def _count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
