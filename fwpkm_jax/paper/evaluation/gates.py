"""Gate statistics: histograms of each memory layer's gate over whole texts.

References: Zhao and Jones 2026, arXiv:2601.00671, Figure 3.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np

from fwpkm_jax.data.packing import PackedRows
from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.interface import Evaluation, Outcome, Subject
from fwpkm_jax.evaluation.readers.whole_pass import RowReader, row_batches
from fwpkm_jax.evaluation.reconfigure import with_chunk_size
from fwpkm_jax.evaluation.record import describe_resets
from fwpkm_jax.evaluation.sources import files_of, missing_text, read_rows, text_sources
from fwpkm_jax.literals import Checked, Count
from fwpkm_jax.paper.evaluation import gates_views as views

_BINS = 10
"""Equal bins of the gate between 0 and 1."""


@dataclass(frozen=True, kw_only=True)
class GatesConfig(Checked):
    """Gate histograms."""

    batch_size: Count = 16
    """Rows per batch, which write into one memory; a data set's last batch may be smaller."""
    chunk_size: Count | None = None
    """Tokens per write. None: the model's."""
    max_batches: Count | None = None
    """Batches read of each data set at most."""


def evaluate(
    subject: Subject, config: GatesConfig, *, sources: Mapping[str, PackedRows] | None = None
) -> Outcome:
    """Histograms of every memory layer's gate over the tokens of each data set.

    Rows are read in batches without caches. All rows of a batch write into one memory, which is
    carried from batch to batch.

    Args:
      sources: rows of each data set by name, in reading order; None: of the texts that options and
        run name.

    Returns:
      Numbers are `tokens` by data set; `gates` by data set and layer, with the `share` of tokens in
      each bin and the `mean`; `bins`, the bounds of the bins; `gate_used`, whether the gate affects
      this model. Arrays hold `counts` `[sources, layers, bins]`.

    Raises:
      ValueError: the model has no memory layer.
    """
    if not subject.memory:
        raise ValueError("The model has no memory layer (memory_layers=()), so it has no gates.")
    files: dict[str, str] = {}
    if sources is None:
        texts = text_sources(subject.text)
        files = files_of(text.files for text in texts)
        sources = {text.name: read_rows(text.name, subject.text) for text in texts}
    model = with_chunk_size(subject.model, config.chunk_size)
    began = time.monotonic()
    reader = RowReader(
        model,
        subject.first_memory,
        fast_weight_dtype=subject.fast_weight_dtype,
        partition=subject.partition,
    )
    counts: dict[str, dict[str, np.ndarray]] = {}
    sums: dict[str, dict[str, float]] = {}
    total = sum(len(_chosen(rows, config)) for rows in sources.values())
    forecast = Forecast("gates", total=total, unit="rows")
    for name, rows in sources.items():
        counts[name] = {layer: np.zeros(_BINS, np.int64) for layer in reader.memory}
        sums[name] = dict.fromkeys(reader.memory, 0.0)
        for batch in row_batches(
            rows, _chosen(rows, config), batch_size=config.batch_size, keep_last=True
        ):
            for layer, gate in jax.device_get(reader.write(batch)).items():
                counts[name][layer] += np.histogram(gate, _BINS, (0.0, 1.0))[0]
                sums[name][layer] += float(gate.sum(dtype=np.float64))
            forecast.add(len(batch))
    tokens = {name: int(next(iter(by.values())).sum()) for name, by in counts.items()}
    fast_weight = model.config.fast_weight
    return Outcome(
        numbers={
            "bins": np.linspace(0, 1, _BINS + 1).tolist(),
            "tokens": tokens,
            "gates": {
                name: {
                    layer: {
                        "share": (one / tokens[name]).tolist(),
                        "mean": sums[name][layer] / tokens[name],
                    }
                    for layer, one in by_layer.items()
                }
                for name, by_layer in counts.items()
            },
            "gate_used": fast_weight.gate_in_output or fast_weight.weight_by_gate,
            "seconds": time.monotonic() - began,
        },
        scored_tokens=sum(tokens.values()),
        arrays={"counts": np.array([list(by.values()) for by in counts.values()])},
        files=files,
        mode=f"batches of {config.batch_size} rows share a memory",
        resets=describe_resets(subject.memory, fast_weights="never", queue="batch", caches="row"),
        chunk_size=config.chunk_size,
    )


def _chosen(rows: PackedRows, config: GatesConfig) -> range:
    """The rows of a data set that are read."""
    limit = None if config.max_batches is None else config.max_batches * config.batch_size
    return range(len(rows))[:limit]


def _missing(subject: Subject, config: GatesConfig) -> str | None:
    if not subject.memory:
        return "a memory layer"
    return missing_text(subject.text)


GATES = Evaluation(
    name="gates",
    config=GatesConfig,
    evaluate=evaluate,
    limit="max_batches",
    title="How far the gates open",
    about=(
        "Each memory layer has a gate for every token: at 1 the layer outputs only what it read "
        "from its memory, at 0 only the token's own value. The histogram counts the gate's values."
    ),
    table=views.table,
    plot=views.plot,
    finding=views.finding,
    missing=_missing,
    one_stream=False,
)
