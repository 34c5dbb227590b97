"""README's tables of what a memory gains and costs."""

from __future__ import annotations

from benchmarks.paper.published import PUBLISHED
from lab.findings import forgetting, performance, real_model, recall, text
from lab.findings.stored import markdown, over_books_and_seeds


def results() -> str:
    """Six rows in plain words: a real model, recall, text, speed, cost, what does not work."""
    later = over_books_and_seeds(text.difference(text.LONG, "later"))
    facts, frozen = recall.facts()
    kept = [
        forgetting.kept("open", one, forgetting.FACTS).mean() for one in ("plain", forgetting.SMALL)
    ]
    models = performance.NONE, performance.FWPKM
    none, three = (performance.samples(performance.step(x)) for x in models)
    theirs = [PUBLISHED[x].samples_per_second for x in models]
    low, high = performance.longer_cpu()
    rows = [
        ["a real model", _real_model()],
        [
            "recall",
            f"Of facts stated 96 to 255 tokens earlier, outside attention, {100 * facts:.1f} % are"
            f" answered; {100 * frozen:.1f} % (a guess) if the memory is not written.",
        ],
        [
            "text",
            f"The loss of unseen books after the first 8 kB changes by {later:+.4f} nats per byte:"
            " with eight books, no clear gain.",
        ],
        [
            "speed on one H100",
            f"The paper's model trains about {three} samples per second with three memories,"
            f" about {none} without. The paper: {theirs[1]:.0f} and {theirs[0]:.0f}.",
        ],
        [
            "cost on a CPU",
            "Three memories make a training step of the paper's model longer by"
            f" {100 * low:.0f} to {100 * high:.0f} % (least and most of three repetitions).",
        ],
        [
            "what does not work",
            "If a question uses other words than the training questions, small models rarely find"
            f" the number. After fifty newer facts, {100 * kept[0]:.0f} % of the old ones are still"
            f" recalled with the default write, {100 * kept[1]:.0f} % with the retention write.",
        ],
    ]
    return markdown(["", ""], rows)


def _real_model() -> str:
    """What SmolLM2 answers of an earlier session, beside its controls."""
    written = real_model.asked("generated", "written")
    low, high = (100 * (written["exact"] + sign * written["interval"]) for sign in (-1, 1))
    shares = [
        100 * line["exact"]
        for line in (
            real_model.asked("generated", "not written"),
            real_model.asked("generated", real_model.BASE, memory="none"),
            real_model.asked("new_words", "written"),
        )
    ]
    ours, alone, of = real_model.right_documents()["LAMBADA"]
    lambada = [100 * right / of for right in (ours, alone)]
    by_hand = [
        100 * real_model.asked(name, "written")["exact"] for name in ("by hand", "by hand, second")
    ]
    return (
        "SmolLM2-135M, frozen, with a memory that was trained alone, gives"
        f" {100 * written['exact']:.0f} % [{low:.0f}, {high:.0f}] of the answers exactly, if an"
        " earlier conversation stated them in generated sentences that training never had;"
        f" {shares[0]:.0f} % if the memory is not written, {shares[1]:.0f} % without a memory, with"
        f" all in its context. With new names and values alone it is {shares[2]:.0f} %, in two sets"
        f" written by hand {by_hand[0]:.0f} and {by_hand[1]:.0f} %. Told nothing, the memory leaves"
        f" the model as it was; it gives the last word of LAMBADA's texts in {lambada[0]:.0f} %,"
        f" the model alone in {lambada[1]:.0f} %"
        " ([measured](docs/measurements/real_model.md))."
    )


def gains() -> str:
    """What is gained, each row with the same without the memory or without writing it."""
    later = over_books_and_seeds(text.difference(text.LONG, "later"))
    writes = ("plain", forgetting.SMALL)
    kept = [forgetting.kept("open", one, forgetting.FACTS).mean() for one in writes]
    rows = [
        *recall.readme(),
        [
            "loss on unseen books after the first 8 kB, relative to the backbone, nats per byte",
            f"{later:+.4f}",
            "",
        ],
        [
            "facts still recalled after fifty newer ones: default write, retention write",
            f"{kept[0]:.2f}, {kept[1]:.2f}",
            "",
        ],
    ]
    return markdown(["", "with FwPKM", "without, or frozen memory"], rows)


def costs() -> str:
    """What the paper's model costs on a CPU."""
    head = ["", "without a memory", "with FwPKM in three layers"]
    return markdown(head, performance.readme_cost())


def notes() -> str:
    """What the authors' memory costs beside this one."""
    return performance.beside_the_authors()
