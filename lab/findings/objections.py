"""Nine objections of a reviewer to earlier pages, and the lines that settle them."""

from __future__ import annotations

import numpy as np

from lab.findings import comparison, forgetting, generalise, performance, text
from lab.findings.needles import HALF, OPEN, shares, shares_by_seed
from lab.findings.stored import markdown, over_books_and_seeds, share_over_seeds

SETTLED = "settled"


def rows() -> list[tuple[str, str, str, str]]:
    """Objection, what the lines say now, where they are, and whether that settles it: all are."""
    near, *others = generalise.small()[1:]
    half, opened = (
        share_over_seeds(shares_by_seed(model, "needle_1x", readings=1)) for model in (HALF, OPEN)
    )
    later = text.difference(text.LONG, "later")
    half_text = forgetting.minus_plain("half", forgetting.STILL, forgetting.TEXT)
    open_facts = forgetting.minus_plain("open", forgetting.SMALL, forgetting.FACTS)
    gain, loss = forgetting.domains(forgetting.PLAIN)
    control = forgetting.unread(forgetting.UNREAD_PLAIN_TEXT)
    stores = [
        forgetting.lost("again", method, forgetting.FACTS).mean()
        for method in (
            *(forgetting.STORE_SMALL, forgetting.SMALL),
            *(forgetting.STORE_LARGE, forgetting.LARGE),
        )
    ]
    equal, wide = comparison.MEMORIES[2], comparison.MEMORIES[6]
    matrix, sparse = (np.mean(comparison.shares(x, 64)) for x in (wide, equal))
    kept = performance.keeping("train")
    default = performance.times_faster(performance.RUNS[0], "default", "train")
    assert default is not None
    return [
        (
            '"They answer in no other words": exact match measured the form of the answer',
            f"first digit {near.first.mean:.2f} with one word changed, {others[0].first.mean:.2f}"
            " in another sentence",
            f"`{generalise.SMALL}`",
            SETTLED,
        ),
        (
            "The better of two trainings was shown",
            f"all {len(shares(HALF, 'needle_1x', readings=1))}, of three seeds: {half:.2f}; gates"
            f" initialised open are the main row, {opened:.2f}",
            "`study_cpu.jsonl`, `study_second_cpu.jsonl`",
            SETTLED,
        ),
        (
            "The interval of text was over seeds alone",
            f"over books and seeds {over_books_and_seeds(later):+.4f}; one book contributes"
            f" {later.mean(axis=0).min():+.4f}",
            f"`{text.LINES}`",
            SETTLED,
        ),
        (
            "What lasts: 60 pairs of three models were taken for independent",
            f"over seeds, gates initialised open {open_facts:+.2f}; at a half {half_text:+.2f}, of"
            " which the page says that it shows no more",
            "`retention_open_cpu.jsonl`, `retention_gated_cpu.jsonl`",
            SETTLED,
        ),
        (
            "Domains: no unread control, and a mean over five was divided by one over six",
            f"both over the same five: gain {gain.mean:.4f}, loss {loss.mean:.4f}. Each"
            f" domain left unread once, {forgetting.models(control.seeds)} of plain text: gain"
            f" {control.read.mean():+.4f} where it is read, {control.never.mean():+.4f} where not."
            f" {forgetting.difference(control)}",
            f"`retention_plain_text_cpu.jsonl`, `{forgetting.UNREAD_PLAIN_TEXT}`",
            SETTLED,
        ),
        (
            "Replay of 2,048: the rival is exact neighbours over the same store",
            f"lost among other facts, one seed: over replay's 512 tokens {stores[0]:.2f}"
            f" (replay {stores[1]:.2f}), over its 2,048 {stores[2]:.2f} (replay {stores[3]:.2f})",
            f"`{forgetting.FILES['again']}`",
            SETTLED,
        ),
        (
            '"FwPKM holds most" compared 72 kB and more with 8 kB',
            f"DeltaNet {matrix:.2f} of 64 pairs with {comparison.bytes_of(wide)[0]:,} bytes, FwPKM"
            f" {sparse:.2f} with {comparison.bytes_of(equal)[0]:,}",
            f"`{comparison.LINES}`",
            SETTLED,
        ),
        (
            "193 and 92 times the authors' speed: mostly the allocator",
            f"about {performance.about(min(kept))} times with an allocator that keeps memory,"
            f" {performance.about(default)} with glibc's",
            ", ".join(f"`memory_cpu_{run}.json`" for run in performance.RUNS),
            SETTLED,
        ),
        (
            "Results without a meaning at this size",
            "LongBench, attention that learned nothing, PKM beside FwPKM and rankings of delta"
            " rules are on no page of results",
            "`lab/archive`",
            SETTLED,
        ),
    ]


def table() -> str:
    numbered = ((str(number), *row) for number, row in enumerate(rows(), 1))
    return markdown(["", "objection", "what the lines say", "lines", "state"], list(numbered))
