"""Gate statistics: histograms of each memory layer's gate over whole texts.

References: Zhao and Jones 2026, arXiv:2601.00671, Figure 3.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.data import load_tokenizer
from fwpkm_jax.data.packing import PackedRows
from fwpkm_jax.evaluation.continual.domains import read_rows
from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.gates.gates_views import gates_finding, gates_table, plot_gates
from fwpkm_jax.evaluation.interface import Evaluation, Subject
from fwpkm_jax.evaluation.readers.devices import memory_on_devices, model_on_devices
from fwpkm_jax.evaluation.readers.fast_weight_dtype import FastWeightDtype, as_stored
from fwpkm_jax.evaluation.readers.whole_pass import row_batches, write_rows
from fwpkm_jax.evaluation.reconfigure import with_chunk_size
from fwpkm_jax.evaluation.record import Origin, Result, describe_resets, first_group, make_result
from fwpkm_jax.evaluation.sources import missing_text, text_sources
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.literals import check_literals
from fwpkm_jax.models.language_model import LanguageModel, Memory


@dataclass(frozen=True, kw_only=True)
class GatesConfig:
    """Gate histograms."""

    data: tuple[str, ...] = ()
    """Files or folders of text, one data set each, read in this order without resetting the memory
    between them. Empty: the run's validation text."""
    batch_size: int = 16
    """Rows per batch, which write into one memory; a data set's last batch may be smaller."""
    length: int | None = None
    """Tokens of a row. None: the run's training length."""
    chunk_size: int | None = None
    """Tokens per write. None: the model's."""
    bins: int = 10
    """Equal bins of the gate between 0 and 1."""
    max_batches: int | None = None
    """Batches read of each data set at most."""
    fast_weight_dtype: FastWeightDtype = "float32"
    """Memory precision between batches; bfloat16 rounds it after each, as the release does."""

    def __post_init__(self) -> None:
        check_literals(self)
        for name in ("batch_size", "length", "chunk_size", "bins", "max_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")


def gate_statistics(
    model: LanguageModel,
    memory: Memory,
    *,
    config: GatesConfig,
    sources: Mapping[str, PackedRows],
    seed: int = 0,
    origin: Origin | None = None,
    partition: Partition | None = None,
) -> Result:
    """Histograms of every memory layer's gate over the tokens of each data set.

    Rows are read in batches without caches. All rows of a batch write into one memory, which is
    carried from batch to batch.

    Args:
      model: the language model.
      memory: fast weights to start from, leaves `[groups, ...]`; the first group is used.
      config: the protocol; its data and length have been applied to `sources`.
      sources: rows of each data set by name, in reading order.
      seed: the run's seed, for the record; there are no random draws.
      origin: provenance of weights and texts, for the record.
      partition: devices that share the rows and the tokens of each; None: one.

    Returns:
      `results` holds `tokens` by data set; `gates` by data set and layer, with the `share` of
      tokens in each bin and the `mean`; `bins`, the bounds of the bins; `gate_used`, whether the
      gate affects this model. Arrays hold `counts` `[sources, layers, bins]`.

    Raises:
      ValueError: the model has no memory layer.
    """
    if not memory:
        raise ValueError("The model has no memory layer (memory_layers=()), so it has no gates.")
    model = model_on_devices(partition, with_chunk_size(model, config.chunk_size))
    began = time.monotonic()
    start = memory_on_devices(partition, first_group(memory))
    # Copied: the buffers are donated, and the caller's memory is needed again.
    carried = as_stored(jax.tree.map(jnp.copy, start), config.fast_weight_dtype)
    found: dict[str, dict[str, _Histogram]] = {}
    total = sum(len(_chosen(rows, config)) for rows in sources.values())
    forecast = Forecast("gates", total=total, unit="rows")
    for name, rows in sources.items():
        carried, found[name] = _read_source(*(model, carried, rows, config, forecast), partition)
    tokens = {name: int(next(iter(by.values())).counts.sum()) for name, by in found.items()}
    fast_weight = model.config.fast_weight
    return make_result(
        "gates",
        model=model,
        memory=memory,
        config=config,
        origin=origin or Origin(),
        seed=seed,
        scored_tokens=sum(tokens.values()),
        mode=f"batches of {config.batch_size} rows share a memory",
        resets=describe_resets(memory, fast_weights="never", queue="batch", caches="row"),
        fast_weight_dtype=config.fast_weight_dtype,
        results={
            "bins": np.linspace(0, 1, config.bins + 1).tolist(),
            "tokens": tokens,
            "gates": {
                name: {layer: one.describe() for layer, one in by_layer.items()}
                for name, by_layer in found.items()
            },
            "gate_used": fast_weight.gate_in_output or fast_weight.weight_by_gate,
            "seconds": time.monotonic() - began,
        },
        arrays={"counts": np.array([[one.counts for one in by.values()] for by in found.values()])},
    )


class _Histogram:
    """Counts and mean of a layer's gates."""

    def __init__(self, bins: int):
        self.counts = np.zeros(bins, np.int64)
        self._sum = 0.0

    def add(self, gate: np.ndarray) -> None:
        self.counts += np.histogram(gate, len(self.counts), (0.0, 1.0))[0]
        self._sum += float(gate.sum(dtype=np.float64))

    def describe(self) -> dict[str, Any]:
        total = int(self.counts.sum())
        return {"share": (self.counts / total).tolist(), "mean": self._sum / total}


def _read_source(
    model: LanguageModel,
    memory: Memory,
    rows: PackedRows,
    config: GatesConfig,
    forecast: Forecast,
    partition: Partition | None,
) -> tuple[Memory, dict[str, _Histogram]]:
    """The memory after reading a data set, and each layer's histogram."""
    graphdef, params = nnx.split(model)
    histograms = {layer: _Histogram(config.bins) for layer in memory}
    chosen = _chosen(rows, config)
    for batch in row_batches(rows, chosen, batch_size=config.batch_size, keep_last=True):
        memory, gates = write_rows(
            *(graphdef, params, memory, batch),
            fast_weight_dtype=config.fast_weight_dtype,
            partition=partition,
        )
        for layer, gate in jax.device_get(gates).items():
            histograms[layer].add(gate)
        forecast.add(len(batch))
    return memory, histograms


def _chosen(rows: PackedRows, config: GatesConfig) -> range:
    """The rows of a data set that are read."""
    limit = None if config.max_batches is None else config.max_batches * config.batch_size
    return range(len(rows))[:limit]


def _missing(subject: Subject, config: GatesConfig) -> str | None:
    if not subject.memory:
        return "a memory layer"
    return missing_text(subject.text, config.data)


def _run(subject: Subject, config: GatesConfig) -> Result:
    data = dataclasses.replace(subject.text, length=config.length or subject.text.length)
    sources = text_sources(data, config.data)
    return gate_statistics(
        subject.model,
        subject.memory,
        config=config,
        sources={source.name: read_rows(source.name, data) for source in sources},
        seed=subject.seed,
        origin=subject.origin_of(
            (source.files for source in sources), load_tokenizer(data.tokenizer)
        ),
        partition=subject.partition,
    )


GATES = Evaluation(
    config=GatesConfig,
    data="text",
    limit="max_batches",
    in_default_suite=False,  # Says little about a model whose gate is always open or always shut.
    one_stream=False,
    run=_run,
    table=gates_table,
    plot=plot_gates,
    title="How far the gates open",
    about=(
        "Each memory layer has a gate for every token: at 1 the layer outputs only what it read "
        "from its memory, at 0 only the token's own value. The histogram counts the gate's values."
    ),
    finding=gates_finding,
    missing=_missing,
)
