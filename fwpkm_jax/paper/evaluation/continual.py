"""Continual learning: a memory reads domain after domain and is evaluated on all of them.

References: Zhao and Jones 2026, arXiv:2601.00671, section 4.5, Figure 6.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.interface import Evaluation, Outcome, Subject
from fwpkm_jax.evaluation.intervals import clustered_mean
from fwpkm_jax.evaluation.readers.finite import require_finite
from fwpkm_jax.evaluation.readers.whole_pass import RowReader, row_batches
from fwpkm_jax.evaluation.reconfigure import with_chunk_size
from fwpkm_jax.evaluation.record import describe_resets
from fwpkm_jax.evaluation.sources import files_of
from fwpkm_jax.literals import Checked, Count
from fwpkm_jax.paper.evaluation import continual_views as views
from fwpkm_jax.paper.evaluation.domains import Domain, Part, read_domains


@dataclass(frozen=True, kw_only=True)
class ContinualConfig(Checked):
    """Continual learning over several domains."""

    domains: tuple[str, ...] = ()
    """NAME=PATH of each domain, in learning order. A path is a folder with train (adapted to) and
    valid (evaluated on), or one file: the first half of its rows is adapted to, the second half is
    evaluated on. The paper's domains: DM Mathematics, FreeLaw, PhilPapers, PubMed Central, Ubuntu
    IRC, USPTO."""
    batch_size: Count = 8
    """Rows per batch, which write into one memory; incomplete batches are left out, also in
    evaluation."""
    chunk_size: Count | None = None
    """Tokens per write. None: the model's."""
    max_batches: Count | None = None
    """Batches read of each part of each domain at most."""
    max_eval_batches: Count | None = None
    """Batches evaluated of each domain at most. None: as max_batches."""


def evaluate(
    subject: Subject, config: ContinualConfig, *, domains: Sequence[Domain] | None = None
) -> Outcome:
    """Losses of all domains before and after each domain was read, with fixed slow weights.

    Stage 0 evaluates the initial memory. Every further stage reads the adaptation part of the next
    domain, where all rows of a batch write into the same memory. It then evaluates all domains with
    writing disabled.

    Args:
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
    if domains is None:
        domains = read_domains(config.domains, subject.text)
    # Checked first, because reading may take hours.
    adapted = [_whole_batches(one.name, one.adapt, config, config.max_batches) for one in domains]
    limits = config.max_batches, config.max_eval_batches
    held_out = [_whole_batches(one.name, one.evaluate, config, *limits) for one in domains]
    adapt_tokens, eval_tokens = (list(map(_num_tokens, parts)) for parts in (adapted, held_out))
    # Without a memory all stages have the same losses.
    stages = 1 + len(domains) * bool(subject.memory)
    total = sum(adapt_tokens) + stages * sum(eval_tokens)
    forecast = Forecast("continual", total=total, unit="tokens")
    began = time.monotonic()
    reader = RowReader(
        with_chunk_size(subject.model, config.chunk_size),
        subject.first_memory,
        fast_weight_dtype=subject.fast_weight_dtype,
        partition=subject.partition,
    )
    batches = partial(row_batches, batch_size=config.batch_size, keep_last=False)

    def row_losses(part: Part) -> np.ndarray:
        losses = np.concatenate(jax.device_get([reader.losses(rows) for rows in batches(*part)]))
        forecast.add(_num_tokens(part))
        return require_finite(losses, where="continual")

    columns = [[row_losses(part)] for part in held_out]
    for part in adapted:
        for rows in batches(*part):
            reader.write(rows)
        jax.block_until_ready(reader.memory)
        forecast.add(_num_tokens(part))
        for column, other in zip(columns, held_out, strict=True):
            column.append(row_losses(other) if subject.memory else column[0])
    losses = [np.stack(column) for column in columns]
    return Outcome(
        numbers={
            "domains": [domain.name for domain in domains],
            "adapt_tokens": adapt_tokens,
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
        resets=describe_resets(subject.memory, fast_weights="never", queue="batch", caches="row"),
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


def _whole_batches(
    domain: str, part: Part, config: ContinualConfig, *most_batches: int | None
) -> Part:
    """The rows of a part that are read: as many whole batches as there are, within the limits."""
    size = config.batch_size
    if len(part.indices) < size:
        raise ValueError(
            f"A part of {domain} holds {len(part.indices)} rows, less than one batch of {size}; "
            "give more text or lower batch_size."
        )
    limits = [limit for limit in most_batches if limit is not None]
    return part._replace(indices=part.indices[: size * min([len(part.indices) // size, *limits])])


def _num_tokens(part: Part) -> int:
    return len(part.indices) * len(part.rows[0]["loss_weight"])


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
