"""The numbers in the pages' own sentences: each with what it is made of.

Tables and paragraphs behind a comment are written by `lab.pages`. All other numbers of README and
of the pages of measurements stand in a phrase of this file: `measured`, of stored lines and of
computations of the package, or `SET`, what was chosen for a run. A test takes these phrases out of
a page and lets no number be left.
"""

from __future__ import annotations

import re

import jax
import numpy as np

from benchmarks.paper.parameters import count_parameters
from fwpkm_jax.configs import recall as recall_config
from fwpkm_jax.configs import recall_carried
from fwpkm_jax.configs import sdm as sdm_config
from fwpkm_jax.data import RecallData
from fwpkm_jax.paper.models import paper_model
from fwpkm_jax.rules import SDM, FwPKM
from fwpkm_jax.rules.matrix import MATRIX_RULES
from lab.findings import comparison, generalise, lookup, performance, sdm, text
from lab.findings.needles import HALF
from lab.findings.stored import Line, document_of, lines_of
from lab.study.configs import CONFIGS, variant
from lab.study.lookup import texts
from lab.study.lookup.neighbours import NearestNeighbours
from lab.study.study import EXCERPT_CHARACTERS

LARGE, SHORT = "real_size_h200.jsonl", "real_size_h100.jsonl"
DEMO = "demo_cpu.jsonl"
_AS_IS = (
    *(r"\d{4}-\d\d-\d\d", r"\d+ November \d{4}", r"November \d{4}"),
    *(r"(?:jax|flax|Python|CUDA|arXiv:|Apache-)\s?\d[\d.]*\d", r"CUDA \d+", r"Table 1"),
    *(r"Qwen2\.5 to 3\.5", r"(?:Llama|Gemma) 3", r"95 %", r"section \d[\d.]*"),
)
"""Dates, versions and names, which are no results."""


def left_over(page: str, phrases: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Phrases that a page does not have, and its numbers that no phrase has.

    Args:
      page: Markdown; code, links, and what stands behind a comment of `lab.pages` do not count.
      phrases: with single spaces where the page may break a line.
    """
    found = _own(page)
    missing = [phrase for phrase in phrases if phrase not in found]
    for phrase in sorted(phrases, key=len, reverse=True):
        found = found.replace(phrase, "")
    for pattern in _AS_IS:
        found = re.sub(pattern, "", found)
    numbers = re.finditer(r"(?<![\w.-])[+-]?\d[\d,.]*", found)
    return missing, [found[max(one.start() - 30, 0) : one.end() + 20] for one in numbers]


def _own(page: str) -> str:
    """The page's own sentences, in one line."""
    page = re.sub(r"```.*?```|!\[[^]]*\]\([^)]*\)", "", page, flags=re.DOTALL)
    page = re.sub(r"^ *<!-- (?:finding|table): .*?(?=\n\s*\n|\Z)", "", page, flags=re.DOTALL | re.M)
    page = re.sub(r"`[^`]*`|<img[^>]*>|<!--.*?-->|\]\([^)]*\)", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", page)


def measured() -> dict[str, tuple[str, ...]]:
    """Phrases of stored lines and of computations, by page."""
    return {
        "README.md": _readme(),
        "recall.md": _recall(),
        "generalise.md": _generalise(),
        "text.md": _text(),
        "forgetting.md": _forgetting(),
        "comparison.md": _comparison(),
        "state_tracking.md": _states(),
        "performance.md": _performance(),
        "real_size.md": _real_size(),
        "lookup.md": _lookup(),
        "sdm.md": _sdm(),
    }


def _readme() -> tuple[str, ...]:
    paper = paper_model(performance.FWPKM)
    rule = paper.fast_weight.rule
    assert isinstance(rule, FwPKM)
    table = 4 * rule.num_subkeys**2 * rule.value_dim / 1e6
    size = f"{rule.num_subkeys} x {rule.num_subkeys} slots"
    assert round(performance.slots_cost()) == 2
    return (
        *_facts("a two-layer model with a {window}-token attention window"),
        *_facts("stated {least} to {most} tokens earlier"),
        f"{len(MATRIX_RULES)} matrix memories",
        f"the paper's {len(paper.mixers)} layers, width {paper.model_dim} and {size} in three",
        f"A table of {size} of width {rule.value_dim} takes {table:.0f} MB.",
        "takes about twice the forward pass of one with 16 thousand",
        "paper's 32,000-piece tokenizer",
        f"of random names and numbers told twice, it knew {_demo(2, 1500)}",
    )


def _demo(told: int, length: int, *, one_sentence: bool = False) -> str:
    """What the demo's model knew after so many bytes of a book."""
    sought = told, length, one_sentence
    (line,) = (
        x for x in lines_of(DEMO) if (x["told"], x["bytes_read"], x["one_sentence"]) == sought
    )
    return f"{line['right']} of {line['asked']}"


def demo_rows() -> list[str]:
    """The rows of the table in the card of the demo's model."""
    lengths = sorted({line["bytes_read"] for line in lines_of(DEMO)})
    rows = [f"| {x:,} | {_demo(1, x)} | {_demo(2, x)} |" for x in lengths]
    return [*rows, f"| 1,500, one sentence for all | - | {_demo(2, 1500, one_sentence=True)} |"]


def _facts(*phrases: str) -> tuple[str, ...]:
    """Phrases with the sizes of the default run's facts."""
    run = recall_config.get_config()
    assert isinstance(run.data, RecallData)
    layers, window = len(run.model.mixers), run.model.window
    sizes = {
        "length": run.data.length,
        "facts": run.data.num_facts,
        "values": run.data.num_values,
        "window": window,
        "reach": layers * (window - 1),
        "least": run.data.min_distance,
        "most": run.data.length - 1,
    }
    return tuple(phrase.format(**sizes) for phrase in phrases)


def _study_weights(*memory_layers: int) -> str:
    model = variant(HALF, memory_layers=memory_layers).model
    memory = sum(leaf.size for leaf in jax.tree.leaves(model.fast_weight.rule.memory_shapes))
    weights = count_parameters(model).total - len(memory_layers) * memory
    return f"{weights / 1e6:.2f}M slow weights"


def _recall() -> tuple[str, ...]:
    carried = recall_carried.get_config().training
    together = carried.batch_size // carried.memory.groups
    training = variant(HALF).training
    megabytes = training.steps * training.batch_size * variant(HALF).data.length / 1e6
    return (
        *_facts("sequences of {length} tokens state {facts} facts with {values} possible values"),
        *_facts("window is {window} tokens, so two layers reach {reach} tokens back"),
        *_facts("a guess, 1 of {values}"),
        f"{together} sequences share one memory",
        f"{_study_weights(2)}, trained on {megabytes:.1f} MB of books",
    )


def _generalise() -> tuple[str, ...]:
    small = [x for x in lines_of(generalise.SMALL) if x["readings"]]
    return (
        f"one of the five at random is right in {generalise.GUESS:.2f} of the cases",
        f"{small[0]['samples']} haystacks in each wording",
        f"for {_steps()} steps only",
    )


def _steps(file: str = LARGE) -> int:
    return max(
        line["step"] for line in lines_of(file) if line["part"] == "train" and "step" in line
    )


def _books() -> int:
    of = (x for x in lines_of(LARGE) if (x["part"], x.get("way")) == ("text", "written"))
    return len(next(of)["nats"])


def _text() -> tuple[str, ...]:
    long = text._runs("fwpkm", text.LONG)
    share = 100 * np.expm1(-text.difference(text.LONG, "later").mean())
    return (
        f"Backbone and FwPKM ({_study_weights().split()[0]} and {_study_weights(2)}, byte-level,",
        f"first {long[0]['characters']:,} characters of eight books",
        f"after {_steps()} steps, with an interval over its {_books()} books",
        f"{share:.1f} % of perplexity per byte",
    )


def _forgetting() -> tuple[str, ...]:
    plan: Line = lines_of("retention_open_cpu.jsonl")[0]["settings"]
    return (
        f"{plan['people']} people tell each model five facts: numbers in a haystack of"
        f" {plan['words']} words",
        f"read {plan['pieces'][-1]} pieces of {plan['length']} bytes of other books",
        f"{plan['other_facts']} haystacks with {5 * plan['other_facts']} other facts",
        f"the share of {5 * plan['people']} answers",
        f"after the {plan['pieces'][-1]} texts",
    )


def _comparison() -> tuple[str, ...]:
    settings = comparison.runs(comparison.MEMORIES[5])[0]
    about, updates = settings["settings"], settings["steps"]
    pairs = sorted(test["pairs"] for test in settings["test"])
    trained = sorted(part[0] for part in about["train"])
    reads = [comparison.bytes_of(one)[1] / 1000 for one in comparison.MEMORIES[1:4]]
    tables = [comparison.MEMORIES[index] for index in (1, 2, 3, 5, 6, 7)]
    minutes = [x["cpu_seconds"] / 60 for one in tables for x in comparison.runs(one)]
    return (
        f"Documents have {trained[0]} to {trained[-1]} pairs in training and up to {pairs[-1]} in",
        f"Two heads of {about['width'] // about['heads']} channels, {updates} updates of"
        f" {about['batch_size']} documents",
        f"its bytes are those of {trained[-1]} pairs",
        f"{min(reads):.0f} to {max(reads):.0f} kB",
        f"{min(minutes):.0f} to {max(minutes):.0f} CPU minutes a run",
    )


def _sdm() -> tuple[str, ...]:
    fwpkm, heads = (sdm.runs(memory)[0] for memory in sdm.MEMORIES)
    about = fwpkm["settings"]
    ((pairs, _, _),), ((_, _, tested),) = about["train"], about["test"]
    width = about["width"] // about["heads"]
    rows = width // 2
    reads = {round(run["bytes_touched"] / 1000) for run in (fwpkm, heads)}
    assert heads["state_bytes"] == 4 * about["heads"] * rows**2 * width
    study = CONFIGS["gdn_swa__sdm"]()
    rule, asked = study.model.fast_weight.rule, lines_of(sdm.NUMBERS[1])[0]
    shipped = sdm_config.get_config().model.fast_weight.rule
    asked_of_sdm, *_ = (line for line in lines_of(sdm.LAYER) if line.get("config") == "sdm")
    assert isinstance(rule, SDM)
    assert isinstance(shipped, SDM)
    further = {line["memory"]: line["step"] for line in lines_of(sdm.REAL)}
    (batch,) = {line["batch"] for line in lines_of(sdm.REAL)}
    return (
        f"{shipped.num_slots:,} slots of {shipped.value_dim} numbers each, of which a token reads"
        f" {shipped.num_reads}; SDM also writes {shipped.num_writes}. All trainings of"
        f" the first row stopped their schedule at {asked_of_sdm['steps']} updates",
        f"{rule.num_slots:,} slots of {rule.value_dim} numbers, of which a token writes"
        f" {rule.num_writes} and reads {rule.num_reads}",
        f"the {study.training.steps} steps are the same",
        f"Each of {asked['samples']} haystacks is read four times",
        f"first {EXCERPT_CHARACTERS:,} characters of eight unseen books",
        f"A document states {pairs} pairs",
        f"{fwpkm['steps']} updates of {about['batch_size']} documents at the",
        f"a test with {tested} documents",
        f"a table of {rows**2} slots of {width} numbers",
        f"one table of {rows**2} slots of {about['width']} numbers",
        f"reads the {rows} slots that it writes and {rows} others",
        f"Both read about {reads.pop()} kB",
        f"follows products of {lines_of(sdm.STATES)[0]['settings']['length']} tokens",
        f"in which FwPKM did {further['FwPKM']} steps of {batch} sessions and SDM {further['SDM']}",
        f"with {sdm.SENTENCES} sentences in training, and {len(texts.HELD_OUT)} others that are"
        " asked",
    )


def _states() -> tuple[str, ...]:
    lines = [x for x in lines_of("state_tracking_cpu.jsonl") if x["group"] == "s3"]
    long = [x for x in lines if x["settings"]["start_token"]]
    about = long[0]["settings"]
    minutes = [x["cpu_seconds"] / 60 for x in long]
    short = next(x for x in lines_of("state_tracking_cpu.jsonl") if x["group"] == "parity")
    small = short["settings"]
    return (
        f"documents of {small['length']} tokens in training, up to {small['ends'][-1]} in the test",
        f"learns the {about['length']} tokens of training",
        f"take {small['steps']} steps of {small['batch_size']} documents",
        f"take {about['steps']:,} of {about['batch_size']}, eight heads",
        f"{min(minutes):.0f} to {max(minutes):.0f} CPU minutes a run for the second",
    )


def _performance() -> tuple[str, ...]:
    paper = paper_model(performance.FWPKM)
    rule = paper.fast_weight.rule
    assert isinstance(rule, FwPKM)
    cases = [line["verdict"] for line in lines_of("h100/cases.jsonl")]
    alone = document_of("h100/results.json")["gated_delta"]["result"]["rows"]
    (ours, theirs), (both, both_theirs) = (
        [1000 * x["seconds"] for x in alone if x["passes"] == which]
        for which in ("forward", "train")
    )
    loaded = [performance.step(x, "carried") for x in (performance.NONE, performance.FWPKM)]
    before = [line["milliseconds"] for line in lines_of("h100/before.jsonl")]
    ratio = 100 * (loaded[1] / performance.step(performance.FWPKM) - 1)
    sorts = [
        next(x["measured_ms"] for x in rows if x["class"] == "memories: sort, grouping")
        for rows in (
            document_of(f"compiled_h100/account_{name}.json")["models"][performance.FWPKM]["rows"]
            for name in ("h100", "after")
        )
    ]
    return (
        f"forward {ours:.2f} ms beside {theirs:.2f}, forward and backward {both:.2f} ms beside"
        f" {both_theirs:.2f}, {both / both_theirs:.2f} times as long. The aim was 0.9 times",
        "(0.6.0, Triton 3.7.1, heads 64 wide, bfloat16, one H100)",
        f"({len(paper.mixers)} layers, {paper.model_dim} wide, {rule.num_subkeys} x"
        f" {rule.num_subkeys} slots of {rule.value_dim} numbers in three layers",
        f"{cases.count('agrees')} of {len(cases)} comparisons",
        f"and {len(cases) - cases.count('agrees')} ran out of time",
        *_newest_device(),
        f"takes {loaded[0]:.0f} ms without and {loaded[1]:.1f} ms with memories",
        f"that of the day before {before[0]:.0f} and {before[1]:.1f} ms",
        f"is {ratio:.0f} % slower than a compiled one",
        f"takes {sorts[0]:.1f} ms in place of {sorts[1]:.1f}",
        *(_row_of_steps(name, file) for name, file in _DEVICES.items()),
        *_remat(),
    )


def _newest_device() -> tuple[str, ...]:
    """What the last H200 has measured."""
    folder, models = "h200_3", (performance.NONE, performance.FWPKM)
    lines = [performance.step_line(x, "carried", f"{folder}/steps.jsonl") for x in models]
    before = [performance.step(x, "carried", performance.STEPS_H200) for x in models]
    assert not any(line["differing"] for line in lines)
    none, three = (line["milliseconds"] for line in lines)
    cells = [f"{x['milliseconds']:.1f} ms, {x['samples_per_second']:.1f} samples/s" for x in lines]
    peaks = " and ".join(f"{x['peak_device_megabytes'] / 1000:.1f}" for x in lines)
    document = document_of(f"{folder}/results.json")
    rule = {
        (x["passes"], x["backend"]): f"{1000 * x['seconds']:.2f}"
        for x in document["gated_delta"]["result"]["rows"]
        if "seconds" in x
    }
    cases = [line["verdict"] for line in lines_of(f"{folder}/cases.jsonl")]
    assert set(cases) == {"agrees", "failed"}
    return (
        f"H200, kernels of 2026-11-29, loaded from files | {' | '.join(cells)} | {peaks} GB |",
        f"three memories take {three - none:.1f} ms, the aim is 10",
        f"took {before[0]:.1f} and {before[1]:.1f} ms",
        f"{cases.count('agrees')} of {len(cases)} comparisons of kernels with plain JAX agree",
        f"and {cases.count('failed')} ran out of time",
        f"forward {rule['forward', 'pallas']} ms beside {rule['forward', 'fla']} of"
        f" flash-linear-attention 0.6.0 and {rule['forward', 'jla']} of jax-linear-attention 0.1.0",
        "alone on that H200** (heads 64 wide, bfloat16)",
        f"forward and backward {rule['train', 'pallas']} ms beside {rule['train', 'jla']} of"
        " jax-linear-attention's",
        f"the Triton of that machine ({document['device']['result']['libraries']['triton']})",
    )


_DEVICES = {"H100": performance.STEPS, "H200, kernels of the day before": performance.STEPS_H200}


def _row_of_steps(name: str, file: str) -> str:
    """A device's row: time and rate of both models, and their peaks."""
    cells, peaks = [name], []
    for model in (performance.NONE, performance.FWPKM):
        time = performance.step(model, file=file)
        cells.append(f"{time:.0f} ms, {performance.samples(time)} samples/s")
        (line,) = (
            x
            for x in lines_of(file)
            if (x["model"], x["variant"]) == (model, performance.FLAG) and "milliseconds" in x
        )
        peaks.append(f"{line['peak_device_megabytes'] / 1000:.1f}")
    return f"| {' | '.join(cells)} | {' and '.join(peaks)} GB |"


def _remat() -> tuple[str, ...]:
    """Rows of the table of rematerialisation, and what is said of them."""
    base = "gdn_swa__fwpkm2_6_10"
    of = {row["model"]: row for row in document_of("compiled_h100/remat_0.11.2.json")["rows"]}
    ways = {"None": "", "dots": "__remat_dots", "names": "__remat_names"}
    ways |= {"block": "__remat", "offload": "__remat_offload"}
    rows = []
    for name, ending in ways.items():
        row = of[base + ending]
        kept, peak, host = (row[f"{x}_megabytes"] / 1000 for x in ("kept", "peak", "host"))
        said = "None " if name == "None" else ""
        rows.append(
            f"| {said}| {kept:.2f} | {peak:.2f} | {host:.2f} | {row['modelled_ms']:.1f} ".replace(
                "| 0.00 |", "| 0 |"
            )
        )
    none, block, dots = (of[base + ways[name]] for name in ("None", "block", "dots"))
    times = [100 * (x["modelled_ms"] / none["modelled_ms"] - 1) for x in (block, dots)]
    host = of[base + ways["offload"]]["host_megabytes"] / 1000
    return (
        *rows,
        f"for {times[0]:.0f} % more time; takes a third of it away for {times[1]:.0f} %",
        f"The state takes {none['argument_megabytes'] / 1000:.2f} GB in every row",
        f"The transfers, {host:.1f} GB each way, would take about {1000 * host / 55:.0f} ms each"
        " way at a nominal 55 GB/s",
    )


def _real_size() -> tuple[str, ...]:
    written, backbone = (
        np.array([book[-1] for book in _line("text", variant, way)["nats"]], float)
        for variant, way in (("fwpkm", "written"), ("backbone", "rows"))
    )
    once, four = (_first(reading) for reading in (1, 4))
    data = _line("data")
    megabytes = _steps() * 8 * 4096 / 1e6
    return (
        f"After {_steps()} steps ({megabytes:.0f} MB of text)",
        f"{(backbone - written).mean():.3f} nats per byte better than its backbone",
        f"finds {once:.2f} after one reading and {four:.2f} after four, where one of the five at"
        f" random gives {generalise.GUESS:.2f}",
        f"The text is {data['train_bytes'] / 1e6:.0f} MB of books",
        f"packs {data['train_bytes'] / 1e6:.0f} MB of them",
        f"{_line('traced')['at'] - 3:.0f} of the run's {_line('end')['at']:.0f} s",
        f"only {_steps()} of the {data['steps_of_text']:,} steps of the text",
        f"The loss is of {_books()} unseen books by {_books()} other authors",
        f"trained {_steps(SHORT)} steps of each variant",
        f"checking, tracing and compiling took {_compiled(SHORT):.0f} s",
    )


def _compiled(file: str) -> float:
    """Seconds until the programs of a run at a real size were there."""
    return max(line["at"] for line in lines_of(file) if line["part"] == "compiled")


def _line(part: str, variant: str | None = None, way: str | None = None) -> Line:
    asked = {"part": part, "variant": variant, "way": way}
    return next(
        line
        for line in lines_of(LARGE)
        if all(line.get(name) == value for name, value in asked.items() if value is not None)
    )


def _first(reading: int) -> float:
    """Share of right first digits of one row in new words, 24 million weights."""
    lines = [x for x in lines_of(LARGE) if (x["part"], x.get("variant")) == ("needles", "fwpkm")]
    lines = [x for x in lines if (x["words"], x["reading"]) == ("held out", reading)]
    line = min((x for x in lines if x["way"] == "written"), key=lambda x: x["bytes"])
    return float(np.array(line["by_haystack"])[:, 1].mean())


def _lookup() -> tuple[str, ...]:
    own = [texts.link_of(x) for x in texts.trained_sentences(64)]
    new = [texts.link_of(x) for x in texts.HELD_OUT]
    (least, most), (near, far) = texts.SPAN, texts.SPAN_DISTANCE
    books = {len(line["by_book"]) for line in lines_of(lookup.LINES)}
    steps = {line["steps"] for line in lines_of(lookup.LINES) if not line["given"]}
    assert (books, steps) == ({8}, {800})
    store = NearestNeighbours()
    kept = 4 * store.capacity * (store.key_dim + 32) / 1e3
    return (
        f"A row of {texts.LENGTH:,} bytes of a book states four numbers",
        f"The test has {len(texts.HELD_OUT)} sentences that no training has",
        f"four links of {min(new)} to {max(new)} bytes",
        f"eight unseen books, {len(new) * 8 * texts.NEEDLES} questions in all",
        f"one of the row's four numbers at random has {lookup.GUESS:.2f} right",
        f"Training has 1, 4, 16 or 64 sentences, with links of {min(own)} to {max(own)} bytes",
        f"spans of {least} to {most} bytes of books are repeated {near} to {far} bytes later",
        f"of 64 sentences had {800 * 4 * texts.LENGTH / 1e6:.1f} MB of text",
        f"keep {store.capacity:,} tokens ({kept:.0f} kB), less than FwPKM's table"
        f" ({4 * 64 * 64 * 32 / 1e3:.0f} kB)",
    )


SET: dict[str, tuple[str, ...]] = {
    # The times of commands are of a clock, with machine and date beside them.
    "README.md": (
        "train the default, 600 steps | 3.0 minutes on two free CPU cores, 5.3 beside other work",
        "2.4 and 4.6 minutes on two free cores of two machines, on 29 November",
    ),
    "recall.md": (
        "A haystack of 500 bytes has five of them",
        "7,500 bytes are 15 times the length of training",
        "carried through 120 haystacks of 4,000 bytes",
    ),
    "generalise.md": (
        "one training (0.6M weights, ",
        "over 32 to 64 haystacks",
        "The 24M model reads rows of 4,096 bytes, the 2M model of 1,024",
        "102 wordings at distances from 4 to 78 bytes",
        "any model of more than 24M weights",
        "0.6M weights: ",
    ),
    "text.md": (
        "the first run at 24M weights",
        "perplexities are 30 and more",
    ),
    "forgetting.md": ("Replay of 2,048 tokens keeps 2,048 of about 5,700 bytes that were read",),
    "comparison.md": (
        "if it has 256 slots or more",
        "with as many bytes as 256 slots",
    ),
    "sdm.md": (
        "as it was after 80,000 sessions",
        "A FwPKM token reads 8 slots",
        # Of a training before the settings; its lines are not kept.
        "none of the 25 questions (a loss of 1.59 at the end of training)",
        "chance is 1/2 and 1/6",
        "FwPKM's rate of 1e-2 had not begun to learn after 40 updates",
        "at 3.16e-3 it had just begun to learn after 40 updates, at 1e-2 it had not after 80",
    ),
    "state_tracking.md": (
        "A write of strength up to 1 shrinks the state along its key; one of strength 2 reflects",
        "sums modulo 3",
        "two layers, a convolution, up to 40 tokens",
    ),
    "performance.md": (
        "An H200 has the arithmetic of an H100 and 1.4 times its bandwidth",
        "their forward pass at 512 x 512 slots needs more than 19 GB",
        "agree with the authors' class to 5e-7 of their norms",
        "agrees in float64 to 1e-9, gradients to 1e-8",
        "(, twelve layers, 8 sequences of 4096 tokens), by the program compiled for an absent H100",
        "on 2 cores",
        "10 steps three times",
        "Two runs of two steps from the same state",
        "0.23 million weights, one memory of 4,096 slots, 16 batch slots",
    ),
    "lookup.md": (
        "sliding windows (16 bytes), 64 wide, and train for 800 steps of four rows",
        "(64 x 64 slots, gates initialised open)",
        "with eight matrices of 48 x 48 (72 kB)",
        "are set to 1, for reads and writes",
        "a convolution and a window of 16 bytes each, which reach 31 bytes back",
        "could carry a key over 77 bytes",
        "0.6M weights, 128 wide, 400 steps of eight rows of 512 bytes",
        "whose link has 4 bytes",
        "A model with FwPKM takes 5 CPU minutes to train, full attention and the matrix 11 to 14",
        "a slow memory (PKM) of 64 x 64 slots",
        "at most 64 fixed ones",
    ),
    "real_size.md": (
        "a model of 24 million slow weights",
        "after 128 kB no more than chance",
        "six layers of Gated DeltaNet, 512 wide",
        "FwPKM with 256 x 256 slots before layers 2 and 4",
        "in rows of 4,096 bytes",
        "in 102 wordings; 20 further ones",
        "two million weights and rows of 1,024 bytes, in 15 minutes of two CPU cores",
        "Its time ended at haystacks of 2 kB",
        "without a GPU, in 6 minutes and 25 MiB",
        "into 22 MiB",
        "trains until 90 seconds are left",
    ),
}
"""Phrases of what was chosen for a run, of a clock, or published by others, by page."""
