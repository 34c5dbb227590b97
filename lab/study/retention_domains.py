"""What a memory gains from text of several domains, and what later domains take of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.evaluation.intervals import clustered_mean
from fwpkm_jax.evaluation.readers.whole_pass import frozen_row_losses, row_batches, write_rows
from fwpkm_jax.models.language_model import LanguageModel, Memory
from fwpkm_jax.paper.evaluation.domains import Domain, Part
from lab.study.retention_facts import without_history

Rows = Sequence[np.ndarray]
State = TypeVar("State")


def orders(domains: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Orders to read the domains in: as given, backwards, and every second one first."""
    given = tuple(domains)
    return {"given": given, "backwards": given[::-1], "mixed": given[1::2] + given[::2]}


def without(named: dict[str, tuple[str, ...]], unread: str) -> dict[str, tuple[str, ...]]:
    """Orders that leave a domain out, under names that say so."""
    return {
        f"{name} without {unread}": tuple(domain for domain in order if domain != unread)
        for name, order in named.items()
    }


def domains_kept(
    reader: LanguageModel,
    writer: LanguageModel,
    memory: Memory,
    domains: Sequence[Domain],
    unread: Sequence[Domain] = (),
    *,
    batches: int,
    eval_batches: int,
) -> dict[str, Any]:
    """Changes of each domain's loss when it was just read and when all were read, in nats.

    Rows are read side by side, as many as the memory has groups, each into a group of its own, as
    in training. Every loss is of the same unseen rows of a domain, each read by one group with
    writing disabled, so a change is a difference within each row.

    Args:
      reader: the model with the plain write, which evaluates; of exact stores the writer.
      writer: the model with the write that is measured.
      memory: what that write starts from, leaves `[groups, ...]`.
      domains: in reading order.
      unread: domains that are never read, the control.
      batches: rows for each group read of each domain at most.
      eval_batches: rows for each group evaluated of each domain at most.

    Returns:
      see `changes_by_domain`.
    """
    graphdef, params = nnx.split(writer)

    def read(memory: Memory, rows: Rows) -> Memory:
        for batch in rows:
            memory, _ = write_rows(graphdef, params, memory, batch, fast_weight_dtype="float32")
        return memory

    losses = partial(frozen_row_losses, *nnx.split(reader))
    return changes_by_domain(
        jax.tree.map(jnp.copy, memory),  # Its buffers are donated.
        domains,
        unread,
        read=read,
        losses=lambda memory, batch: losses(without_history(memory), batch),
        groups=jax.tree.leaves(memory)[0].shape[0],
        batches=batches,
        eval_batches=eval_batches,
    )


def changes_by_domain(
    state: State,
    domains: Sequence[Domain],
    unread: Sequence[Domain] = (),
    *,
    read: Callable[[State, Rows], State],
    losses: Callable[[State, np.ndarray], jax.Array],
    groups: int,
    batches: int,
    eval_batches: int,
) -> dict[str, Any]:
    """What reading domains one after the other changes in the loss of each.

    Args:
      state: what changes while text is read.
      domains: in reading order.
      unread: domains that are evaluated after each of these and never read.
      read: the state after a domain's batches of rows, each int `[groups, length + 1]`.
      losses: of a batch's rows in nats, `[groups]`.
      groups: rows of a batch.
      batches: of each domain, to read at most.
      eval_batches: of each domain, to evaluate at most.

    Returns:
      `bytes`, read of each domain; by domain, in that order, `own`, the change right after it was
      read; `end`, after all; `forgetting`, end minus own, without the last domain, which nothing
      follows; each as [mean, low, high] with a 95 % interval over rows. `adaptation` and
      `forgetting_mean` are over all rows. `unread` has the names of the unread domains, and
      `unread_changes` for each of them a list like `own`: its change after each domain was read.
    """

    def loss(domain: Domain) -> np.ndarray:
        found = [losses(state, batch) for batch in _batches(domain.evaluate, eval_batches, groups)]
        return np.concatenate(jax.device_get(found))

    before = [loss(domain) for domain in domains]
    unread_before = [loss(domain) for domain in unread]
    own, sizes = [], []
    changes: list[list[list[float]]] = [[] for _ in unread]
    for domain, start in zip(domains, before, strict=True):
        rows = list(_batches(domain.adapt, batches, groups))
        state = read(state, rows)
        own.append(loss(domain) - start)
        sizes.append(sum(batch[:, 1:].size for batch in rows))
        for of_domain, other, first in zip(changes, unread, unread_before, strict=True):
            of_domain.append(over_rows(loss(other) - first))
    end = [loss(domain) - start for domain, start in zip(domains, before, strict=True)]
    lost = [after - just for just, after in zip(own[:-1], end[:-1], strict=True)]
    return {
        "domains": [domain.name for domain in domains],
        "bytes": sizes,
        "own": [over_rows(change) for change in own],
        "end": [over_rows(change) for change in end],
        "forgetting": [over_rows(change) for change in lost],
        "adaptation": over_rows(np.concatenate(own)),
        "forgetting_mean": over_rows(np.concatenate(lost)),
        "unread": [domain.name for domain in unread],
        "unread_changes": changes,
    }


def over_rows(changes: np.ndarray) -> list[float]:
    """Mean of paired differences, and its 95 % interval with rows as the units."""
    mean, interval = clustered_mean(changes.astype(np.float64), np.ones(len(changes)))
    assert interval is not None, "two rows at least"
    return [round(float(value), 6) for value in (mean, *interval)]


def _batches(part: Part, most: int, groups: int) -> Any:
    indices = part.indices[: most * groups]
    return row_batches(part.rows, indices, batch_size=groups, keep_last=False)
