"""FwPKM or Sparse Delta Memory? Short trainings of both, on the same tasks and with equal bytes."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from lab.comparison.mqar_tables import chosen
from lab.findings import comparison, drawing, lookup, recall
from lab.findings.needles import OPEN
from lab.findings.stored import (
    Estimate,
    Line,
    document_of,
    lines_of,
    markdown,
    numbers,
    over_seeds,
    share_over_seeds,
)

LINES = "mqar_sdm_cpu.jsonl"
LAYER = "sdm_layer_cpu.jsonl"
TIMES = "layer_sdm_cpu.json"
CHUNK = "sparse_delta_cpu.json"
MEMORIES = {"FwPKM": "fwpkm_16", "SDM": "sdm_heads"}
"""Names of memories in the lines, by what they are called here."""
NUMBERS = ("other_words_cpu.jsonl", "other_words_sdm_cpu.jsonl")
"""Files of what models of text answer in other words; the second has both memories' later seeds."""
TEXTS = {
    "FwPKM": ("study_second_cpu.jsonl", OPEN),
    "SDM": ("study_sdm_cpu.jsonl", "gdn_swa__sdm__open"),
}
"""Files of the models of text, and the names of the runs in them."""
KEPT = {"FwPKM": "retention_open_cpu.jsonl", "SDM": "retention_sdm_cpu.jsonl"}
CHANGED = "one word changed"
STATES = "state_tracking_sdm_cpu.jsonl"
SDM_LOOKUP = lookup.Curve("SDM", "sdm", "written")
SENTENCES = "64"
"""Of training, for the lookup in others."""
REAL = "real_model_sdm_cpu.jsonl"


def runs(memory: str) -> list[Line]:
    """The trainings of a memory, at the rate that its first seed chose."""
    return chosen(lines_of(LINES))[MEMORIES[memory]]


def shares(memory: str) -> list[float]:
    """Share of right answers in the test, by training."""
    return [test["accuracy"] for run in runs(memory) for test in run["test"]]


def share(memory: str) -> Estimate:
    return share_over_seeds(shares(memory))


def rates(memory: str) -> list[float]:
    """The rates that were tried with the first seed."""
    found = {line["rate"] for line in lines_of(LINES) if line["memory"] == MEMORIES[memory]}
    return sorted(found)


def numbers_in_text(memory: str, words: str = "of training") -> tuple[Estimate, Estimate]:
    """Of haystacks that a model read four times and was asked for in these words: the share of
    right numbers, and of right first digits chosen among the ten, over seeds."""
    run = f"{TEXTS[memory][1]}_seed"
    found = [
        line
        for name in NUMBERS
        for line in lines_of(name)
        if (line["words"], line["readings"]) == (words, 4) and line["run"].startswith(run)
    ]
    assert len({line["run"] for line in found}) == len(found)
    exact = [line["exact"] / line["samples"] for line in found]
    first = [line["digits"][0] / line["samples"] for line in found]
    return share_over_seeds(exact), share_over_seeds(first)


def in_unseen_words(memory: str) -> Estimate:
    """Share of right first digits in sentences that none of 64 in training was, over books and
    seeds."""
    found = lookup.estimate({"FwPKM": lookup.WRITTEN, "SDM": SDM_LOOKUP}[memory], SENTENCES)
    assert found is not None
    return found


def real(memory: str, test: str) -> Estimate:
    """Share of answers that are exact of a real model after further training, over sessions."""
    asked = {"memory": memory, "test": test, "written": True}
    (line,) = (x for x in lines_of(REAL) if asked.items() <= x.items())
    return share_over_seeds(line["by_session"])


def kept(memory: str, after: str) -> Estimate:
    """Share of a hundred facts, told to the models of text, that is right at this moment, by the
    write of the training: over seeds, or over the answers of one training."""
    found = [
        line["facts"][after]
        for line in lines_of(KEPT[memory])
        if (line["measure"], line["method"]) == ("facts", "plain")
    ]
    if len(found) > 1:
        return share_over_seeds([one["exact"] for one in found])
    return Estimate(found[0]["exact"], *found[0]["interval"])


def states(memory: str, group: str) -> Estimate:
    """Share of right labels within the length of training, over seeds."""
    name = {"FwPKM": "fwpkm", "SDM": "sdm_heads"}[memory]
    lines = [x for x in lines_of(STATES) if (x["rule"], x["group"]) == (name, group)]
    return share_over_seeds([line["spans"][0]["accuracy"] for line in lines])


def of_text(memory: str) -> list[Line]:
    """The trainings of the models of text."""
    name, run = TEXTS[memory]
    return [line for line in lines_of(name) if line["run"].partition(":")[0] == run]


def nats(memory: str) -> list[float]:
    """Loss of a byte of unseen books, the memory written while they are read, by training."""
    return [float(np.log(line["ppl"]["writing"])) for line in of_text(memory)]


def microseconds(rule: str, which: str) -> float:
    """CPU time of a layer per token."""
    (row,) = (
        row for row in document_of(TIMES)["rows"] if (row["rule"], row["pass"]) == (rule, which)
    )
    return 1e3 * row["cpu_ms_per_token"]


def facts(config: str) -> Estimate:
    """Share of facts that the default config or `sdm` answers after 200 updates, over seeds."""
    found = [line for line in lines_of(LAYER) if line.get("config") == config]
    return share_over_seeds([line["recall"]["writing"] for line in found])


def facts_of_fwpkm() -> Estimate:
    """The same after all updates of the default config, over seeds."""
    return share_over_seeds(recall.facts_by_training("recall", "writing"))


def answer() -> str:
    pairs = [share(memory) for memory in MEMORIES]
    (updates,) = {run["steps"] for memory in MEMORIES for run in runs(memory)}
    found = [numbers_in_text(memory)[0] for memory in MEMORIES]
    unseen = [in_unseen_words(memory) for memory in MEMORIES]
    others = [kept(memory, "facts_10") for memory in KEPT]
    books = [over_seeds(nats(memory)) for memory in TEXTS]
    first, ours = facts("recall"), facts("sdm")
    assert pairs[0].low > pairs[1].high
    assert ours.low > max(first.high, facts_of_fwpkm().high)
    assert books[0].high < books[1].low
    assert min(one.mean for one in found) > 0.9
    assert max(one.high for one in unseen) < 0.2
    times = microseconds("sdm", "train") / microseconds("fwpkm", "train")
    return (
        "SDM learns facts sooner. FwPKM answers more pairs, costs less in text and takes less time."
        f" After 200 updates SDM answers {ours.mean:.3f} of the facts of the default config, FwPKM"
        f" {first.mean:.3f} ({facts_of_fwpkm().mean:.3f} after 600). Both find numbers in text"
        f" ({found[0].mean:.2f} FwPKM, {found[1].mean:.2f} SDM), neither in sentences that no"
        f" training had ({unseen[0].mean:.2f}, {unseen[1].mean:.2f} of first digits), and both lose"
        f" them among fifty other facts ({others[0].mean:.2f}, {others[1].mean:.2f} are left).\n"
        f"FwPKM is ahead in pairs ({pairs[0].mean:.2f} to {pairs[1].mean:.2f} after {updates}"
        f" updates) and in unseen books ({books[0].mean:.3f} to {books[1].mean:.3f} nats per byte)."
        f" A training step of an SDM layer takes {times:.1f} times the processor time. Trainings"
        " are short: they show which memory learns sooner."
    )


def table() -> str:
    found, changed = (
        [numbers_in_text(x, w)[0] for x in MEMORIES] for w in ("of training", CHANGED)
    )
    unseen = [in_unseen_words(x) for x in MEMORIES]
    assert three_seeds()
    rows = [
        ["facts of the default config, 200 updates", *_two(facts("recall"), facts("sdm"))],
        ["pairs, right of 64", *_two(*(share(x) for x in MEMORIES), digits=2)],
        ["numbers in text, right", *_two(*found, digits=2)],
        ["the same, one word changed", *_two(*changed, digits=2)],
        [f"first digits in unseen sentences, {SENTENCES} in training", *_two(*unseen, digits=2)],
        ["facts in text, after fifty others", *_kept("facts_10")],
        ["unseen books, nats per byte", *_two(*(over_seeds(nats(x)) for x in TEXTS))],
        ["parity of up to 32 bits", *_two(*(states(x, "parity") for x in MEMORIES))],
    ]
    return markdown(["task, three seeds each", *MEMORIES], rows)


def results() -> str:
    digits = [numbers_in_text(x, "another sentence")[1] for x in MEMORIES]
    rows = [
        ["facts of the default config, 600 updates", f"{facts_of_fwpkm():.3f}", "not run", "3"],
        ["first digits, in another sentence", *_two(*digits, digits=2), "3, 3"],
        ["facts in text, told four times", *_kept("told"), "3, 3"],
        ["the same, after 30 other texts", *_kept("text_30"), "3, 3"],
        ["new facts, told once after the texts", *_kept("new_1"), "3, 3"],
        ["permutations of 3, up to 32", *_two(*(states(x, "s3") for x in MEMORIES)), "3, 3"],
        *(
            [f"a real model, {test}", *_two(*(real(x, test) for x in MEMORIES), digits=2), "1, 1"]
            for test in ("generated sentences", "passages")
        ),
        ["microseconds of a layer per token, with gradients", *_times("train"), ""],
        ["the default config's training, tokens per second", *map(_speed, MEMORIES), ""],
    ]
    return markdown(["task", *MEMORIES, "seeds"], rows)


def three_seeds() -> bool:
    """Whether every row of the first table has three trainings of each memory."""
    text = [len(of_text(x)) for x in MEMORIES]
    asked = [line["run"] for name in NUMBERS for line in lines_of(name) if line["readings"] == 4]
    asked = [len({run for run in asked if run.startswith(f"{TEXTS[x][1]}_seed")}) for x in MEMORIES]
    told = {"measure": "facts", "method": "plain"}
    kept_by = [sum(told.items() <= x.items() for x in lines_of(KEPT[y])) for y in MEMORIES]
    of = [line.get("config") for line in lines_of(LAYER)]
    counts = [of.count("recall"), of.count("sdm"), *text, *asked, *kept_by]
    for memory in MEMORIES:
        counts += [len(shares(memory))]
        curve = {"FwPKM": lookup.WRITTEN, "SDM": SDM_LOOKUP}[memory]
        counts += [len(lookup.runs(curve, SENTENCES))]
    return set(counts) == {3}


def _speed(memory: str) -> str:
    (line,) = (x for x in lines_of(LAYER) if x["memory"] == memory and "tokens_per_second" in x)
    return f"{np.median(line['tokens_per_second']):,.0f}"


def chunk(slots: int) -> tuple[float, float]:
    """A chunk's milliseconds by the clock on one core, and their ratio to the sum of its parts."""
    (row,) = (row for row in document_of(CHUNK)["rows"] if row["slots"] == slots)
    return row["milliseconds"]["chunk"], row["of_parts"]


def _kept(after: str) -> list[str]:
    return _two(*(kept(x, after) for x in KEPT), digits=2)


def _times(which: str) -> list[str]:
    return [f"{microseconds(rule, which):.0f}" for rule in ("fwpkm", "sdm")]


def _two(fwpkm: Estimate, sdm: Estimate, *, digits: int = 3) -> list[str]:
    return [f"{one:.{digits}f}" for one in (fwpkm, sdm)]


def notes() -> str:
    long = share_over_seeds(comparison.shares(comparison.MEMORIES[2], 64))
    updates = comparison.runs(comparison.MEMORIES[2])[0]["steps"]
    last = [[run["curve"][at][2] for run in runs("SDM")] for at in (-2, -1)]
    before, after = (sum(one) / len(one) for one in last)
    of_run = {
        memory: [numbers(runs(memory)[0][name]) for name in ("state_bytes", "bytes_touched")]
        for memory in MEMORIES
    }
    tried = {memory: " and ".join(f"{x:g}" for x in rates(memory)) for memory in MEMORIES}
    losses = [np.mean([line["train_loss"] for line in of_text(memory)]) for memory in TEXTS]
    backbone = np.mean(np.log(recall.perplexities("gdn_swa", "study_cpu.jsonl")))
    return "\n".join(
        [
            f"- Pairs: SDM was still learning: {before:.2f} of the pairs of the validation one"
            f" quarter of the training before its end, {after:.2f} at the end. FwPKM answers"
            f" {long.mean:.2f} after {updates} updates of 256 documents.",
            f"- Pairs: FwPKM has {of_run['FwPKM'][0]} bytes of state, of which a token reads"
            f" {of_run['FwPKM'][1]}; SDM {of_run['SDM'][0]} and {of_run['SDM'][1]}. Learning rates"
            f" {tried['FwPKM']} were tried for FwPKM, {tried['SDM']} for SDM, and"
            f" {runs('FwPKM')[0]['rate']:g} and {runs('SDM')[0]['rate']:g} chosen by the first"
            " seed's validation.",
            "- Numbers in text: at the end of training the loss of text and answers is"
            f" {losses[0]:.2f} nats with FwPKM and {losses[1]:.2f} with SDM. Unseen books cost the"
            f" same backbone without a memory {backbone:.3f} nats: learning to answer has its price"
            " in text, and SDM pays more of it.",
            f"- A chunk of 64 tokens that write 64 slots each of {65536:,}, of 256 numbers, takes"
            f" {chunk(65536)[1]:.2f} times the sum of its own parts (gather, products,"
            f" solve, scatter, timed alone) on one core; of {2**20:,} slots it takes"
            f" {chunk(2**20)[0] / chunk(2**14)[0]:.2f} times as long as of {2**14:,}.",
            "- Processor time is that of a layer with one table of 1,024 slots of 64 numbers, 8 of"
            " which a token reads, and 8 of which it writes. The machine did other work at the same"
            " time.",
        ]
    )


def layer() -> str:
    """How the memory layer with the rule SDM learns a small form of the recall task."""
    ours, fwpkm = (
        next(line for line in lines_of(LAYER) if line["memory"] == memory and "data" in line)
        for memory in ("SDM", "FwPKM")
    )
    about, settings = ours["data"], ours["rule"]
    assert (settings["keys"], settings["read_start"]) == ("previous", "writes")
    losses = {
        line["memory"]: ", ".join(f"{loss:.2f}" for loss in line["losses"].values())
        for line in (ours, fwpkm)
    }
    steps = ", ".join([*ours["losses"]][:-1])
    return (
        f"Trained so on {about['num_facts']} facts in {about['length']} tokens, asked at least"
        f" {about['min_distance']} tokens later, with a window of {ours['window']} (one seed,"
        f" {ours['steps']} updates of {ours['batch_size']} documents, FwPKM's rate), it answers"
        f" {ours['validation_accuracy']:.2f} of the validation's questions. Its loss after {steps}"
        f" and {[*ours['losses']][-1]} updates was {losses['SDM']} nats, FwPKM's in a training"
        f" that was stopped after {fwpkm['stopped_after']}: {losses['FwPKM']}."
    )


def draw() -> Figure:
    figure, (axis,) = drawing.new_figure(3.2)
    for memory, color in zip(MEMORIES, (drawing.BLUE, drawing.ORANGE), strict=True):
        for run in runs(memory):
            steps, _, right = zip(*run["curve"], strict=True)
            name = memory if run is runs(memory)[0] else None
            axis.plot(
                steps, right, color=color, linewidth=1.4, marker="o", markersize=5, label=name
            )
    axis.set_ylim(0, 1.05)
    axis.grid(axis="y", color=drawing.GRID, linewidth=0.8)
    drawing.label(axis, x="updates of 32 documents; a line is a seed", y="right, of 64 pairs")
    drawing.legend(figure, axis)
    return figure
