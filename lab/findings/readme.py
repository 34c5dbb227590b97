"""README's tables of what a memory gains and costs."""

from __future__ import annotations

from lab.findings import forgetting, performance, recall, text
from lab.findings.stored import markdown, over_books_and_seeds


def gains() -> str:
    """What is gained, each row with the same without the memory or without writing it."""
    later = over_books_and_seeds(text.difference(text.LONG, "later"))
    writes = ("plain", forgetting.SMALL)
    kept = [forgetting.kept("open", one, forgetting.FACTS).mean() for one in writes]
    rows = [
        *recall.readme(),
        [
            "loss of unseen books from 8 kB on, minus the backbone's, nats per byte",
            f"{later:+.4f}",
            "",
        ],
        [
            "facts left after fifty others: the write of training, and one that keeps",
            f"{kept[0]:.2f}, {kept[1]:.2f}",
            "",
        ],
    ]
    return markdown(["", "with FwPKM", "without, or frozen"], rows)


def costs() -> str:
    """What the paper's model costs on a CPU."""
    head = ["", "without a memory", "with FwPKM in three layers"]
    return markdown(head, performance.readme_cost())


def notes() -> str:
    """What the authors' memory costs beside this one."""
    return performance.beside_the_authors()
