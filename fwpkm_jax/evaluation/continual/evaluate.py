"""Continual learning: a memory reads domain after domain and is evaluated on all of them.

References: Zhao and Jones 2026, arXiv:2601.00671, section 4.5, Figure 6.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.evaluation.continual import views
from fwpkm_jax.evaluation.continual.domains import Domain, Part, read_domains
from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.interface import Evaluation, Outcome, Subject, files_of
from fwpkm_jax.evaluation.intervals import clustered_mean
from fwpkm_jax.evaluation.option_checks import check_least
from fwpkm_jax.evaluation.readers.devices import memory_on_devices, model_on_devices
from fwpkm_jax.evaluation.readers.fast_weight_dtype import FastWeightDtype, as_stored
from fwpkm_jax.evaluation.readers.finite import require_finite
from fwpkm_jax.evaluation.readers.whole_pass import frozen_row_losses, row_batches, write_rows
from fwpkm_jax.evaluation.reconfigure import with_chunk_size
from fwpkm_jax.evaluation.record import describe_resets
from fwpkm_jax.literals import check_literals


@dataclass(frozen=True, kw_only=True)
class ContinualConfig:
    """Continual learning over several domains."""

    domains: tuple[str, ...] = ()
    """NAME=PATH of each domain, in learning order. A path is a folder with train (adapted to) and
    valid (evaluated on), or one file: the first half of its rows is adapted to, the second half is
    evaluated on. The paper's domains: DM Mathematics, FreeLaw, PhilPapers, PubMed Central, Ubuntu
    IRC, USPTO."""
    batch_size: int = 8
    """Rows per batch, which write into one memory; incomplete batches are left out, also in
    evaluation."""
    length: int | None = None
    """Tokens of a row. None: the run's training length."""
    chunk_size: int | None = None
    """Tokens per write. None: the model's."""
    max_batches: int | None = None
    """Batches read of each part of each domain at most."""
    max_eval_batches: int | None = None
    """Batches evaluated of each domain at most. None: as max_batches."""
    fast_weight_dtype: FastWeightDtype = "float32"
    """Memory precision between batches; bfloat16 rounds it after each, as the release does."""

    def __post_init__(self) -> None:
        check_literals(self)
        check_least(self, 1, "batch_size", "length", "chunk_size")
        check_least(self, 1, "max_batches", "max_eval_batches")


def evaluate(
    subject: Subject, config: ContinualConfig, *, domains: Sequence[Domain] | None = None
) -> Outcome:
    """Losses of all domains before and after each domain was read, with fixed slow weights.

    Stage 0 evaluates the initial memory. Every further stage reads the adaptation part of the next
    domain, where all rows of a batch write into the same memory. It then evaluates all domains with
    writing disabled.

    Args:
      subject: the model and its memory, of which the first group is used.
      config: the protocol.
      domains: in learning order; None: those that the options name.

    Returns:
      Numbers are `domains`; `loss` in nats and `perplexity`, a row for each stage and a column for
      each domain; `difference`, loss minus that of stage 0 with a 95 % interval over rows;
      `adaptation` (mean over domains of the difference right after the domain was read),
      `forgetting` (mean increase of a domain's loss from then to the last stage) and `unseen` (mean
      difference of domains that were not read yet). Arrays hold `loss_<domain>` `[stages, rows]`.

    Raises:
      ValueError: a part holds no full batch.
    """
    memory = subject.memory
    if domains is None:
        data = dataclasses.replace(subject.text, length=config.length or subject.text.length)
        domains = read_domains(config.domains, data)
    forecast = Forecast("continual", total=0, unit="tokens")
    stages = _Stages(subject, config, forecast)
    began = time.monotonic()
    for domain in domains:  # Checked first, because reading may take hours.
        for part in (domain.adapt, domain.evaluate):
            stages.check(domain.name, part)
    forecast.total = sum(
        stages.num_tokens(domain.adapt, evaluate=False)
        # Without a memory all stages have the same losses.
        + stages.num_tokens(domain.evaluate, evaluate=True) * (1 + bool(memory) * len(domains))
        for domain in domains
    )
    columns = [[stages.losses(domain.evaluate)] for domain in domains]
    for domain in domains:
        stages.adapt(domain.adapt)
        for column, other in zip(columns, domains, strict=True):
            column.append(stages.losses(other.evaluate) if memory else column[0])
    losses = [np.stack(column) for column in columns]
    eval_tokens = [stages.num_tokens(domain.evaluate, evaluate=True) for domain in domains]
    return Outcome(
        numbers={
            "domains": [domain.name for domain in domains],
            "adapt_tokens": [stages.num_tokens(d.adapt, evaluate=False) for d in domains],
            "eval_tokens": eval_tokens,
            **summarize(losses),
            "seconds": time.monotonic() - began,
        },
        scored_tokens=sum(eval_tokens),
        arrays={
            f"loss_{domain.name}": column for domain, column in zip(domains, losses, strict=True)
        },
        files=files_of(domain.files for domain in domains),
        mode=f"batches of {config.batch_size} rows share a memory; evaluated with writing disabled",
        resets=describe_resets(memory, fast_weights="never", queue="batch", caches="row"),
        chunk_size=config.chunk_size,
    )


def summarize(losses: Sequence[np.ndarray]) -> dict[str, Any]:
    """Tables and means of losses `[stages, rows]`, one array per domain in reading order."""
    losses = [column.astype(np.float64) for column in losses]
    table = np.stack([column.mean(axis=1) for column in losses], axis=1)
    changes = table - table[:1]
    num_domains = len(losses)
    own = np.array([changes[domain + 1, domain] for domain in range(num_domains)])
    unseen = [changes[1 : domain + 1, domain] for domain in range(num_domains)]

    def difference(stage: int, column: np.ndarray) -> dict[str, Any]:
        change = column[stage] - column[0]
        mean, interval = clustered_mean(change, np.ones(len(change)))
        return {"loss": mean, "interval": interval}

    return {
        "loss": table.tolist(),
        "perplexity": np.exp(table).tolist(),
        "difference": [
            [difference(stage, column) for column in losses] for stage in range(len(table))
        ],
        "adaptation": float(own.mean()),
        "forgetting": float(np.mean(changes[-1] - own)),
        "unseen": float(np.mean(np.concatenate(unseen))) if num_domains > 1 else None,
    }


class _Stages:
    """The memory of the current stage: `adapt` writes it, `losses` reads it."""

    def __init__(self, subject: Subject, config: ContinualConfig, forecast: Forecast):
        self._config, self._forecast = config, forecast
        self._partition = partition = subject.partition
        model = model_on_devices(partition, with_chunk_size(subject.model, config.chunk_size))
        memory = memory_on_devices(partition, subject.first_memory)
        self._graphdef, self._params = nnx.split(model)
        # Copied: the buffers are donated, and the caller's memory is needed again.
        self._memory = as_stored(jax.tree.map(jnp.copy, memory), config.fast_weight_dtype)

    def check(self, domain: str, part: Part) -> None:
        if len(part.indices) < self._config.batch_size:
            raise ValueError(
                f"A part of {domain} holds {len(part.indices)} rows, less than one batch of "
                f"{self._config.batch_size}; give more text or lower batch_size or length."
            )

    def num_tokens(self, part: Part, *, evaluate: bool) -> int:
        size = self._config.batch_size
        rows = len(self._indices(part, evaluate=evaluate)) // size * size
        return rows * len(part.rows[0]["loss_weight"])

    def adapt(self, part: Part) -> None:
        """Reads a part once and writes the memory."""
        for batch in self._batches(part, evaluate=False):
            self._memory, _ = write_rows(
                self._graphdef,
                self._params,
                self._memory,
                batch,
                fast_weight_dtype=self._config.fast_weight_dtype,
                partition=self._partition,
            )
        jax.block_until_ready(self._memory)
        self._forecast.add(self.num_tokens(part, evaluate=False))

    def losses(self, part: Part) -> np.ndarray:
        """Mean loss of each row of a part in nats, `[rows]`; the memory is not written."""
        found = [
            frozen_row_losses(
                self._graphdef, self._params, self._memory, batch, partition=self._partition
            )
            for batch in self._batches(part, evaluate=True)
        ]
        losses = np.concatenate(jax.device_get(found))
        require_finite(losses, where="continual")
        self._forecast.add(self.num_tokens(part, evaluate=True))
        return losses

    def _batches(self, part: Part, *, evaluate: bool) -> Iterator[np.ndarray]:
        indices, size = self._indices(part, evaluate=evaluate), self._config.batch_size
        return row_batches(part.rows, indices, batch_size=size, keep_last=False)

    def _indices(self, part: Part, *, evaluate: bool) -> range:
        config = self._config
        limits = [config.max_batches, config.max_eval_batches if evaluate else None]
        limits = [limit * config.batch_size for limit in limits if limit is not None]
        return part.indices[: min(limits, default=None)]


CONTINUAL = Evaluation(
    name="continual",
    config=ContinualConfig,
    evaluate=evaluate,
    limit="max_batches",
    title="Learning domain after domain",
    about=(
        "The memory reads texts of several domains one after the other. After each domain, all "
        "domains are scored on held-out texts with writing disabled; the model's own weights never "
        "change. A loss that falls after its domain was read shows adaptation; a loss that rises "
        "again while other domains are read shows forgetting."
    ),
    table=views.table,
    plot=views.plot,
    finding=views.finding,
    missing=lambda subject, config: None if config.domains else "domains (--continual.domains)",
    one_stream=False,
)
continual_learning = CONTINUAL.of_model
