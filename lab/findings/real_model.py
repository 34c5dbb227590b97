"""A real model with the shipped memory: what an earlier session told it, and what that costs."""

from __future__ import annotations

from lab.findings.stored import Line, lines_of, markdown

LINES = "real_model_shipped_cpu.jsonl"
EARLIER = "real_model_cpu.jsonl"
"""Of the trainings, asked in PyTorch."""
SETS = {
    "generated": "generated",
    "drawn": "drawn verbs and nouns",
    "sessions_by_hand": "by hand",
    "sessions_by_second_hand": "by hand, second",
}
"""Sets of sessions by the name of their file, as the earlier lines call them."""
KEEPS = ", without the write that keeps"
BASE = "the base, all in its context"


def of(what: str) -> list[Line]:
    return [line for line in lines_of(LINES) if line["what"] == what]


def asked(sessions: str, condition: str) -> Line:
    """The answers of a set of sessions under a condition."""
    (found,) = (
        line
        for line in of("asked")
        if (line["sessions"], line["condition"]) == (sessions, condition)
    )
    return found


def base(sessions: str) -> Line:
    """What the model alone answers with all in its context."""
    (found,) = (
        line
        for line in lines_of(EARLIER)
        if line["what"] == "asked"
        and line["memory"].startswith("attention")
        and (line["sessions_file"], line["condition"]) == (SETS[sessions], BASE)
    )
    return found


def share(line: Line) -> str:
    return f"{line['exact']:.2f} ± {line['interval']:.2f}"


def answer() -> str:
    """The page's first paragraph."""
    generated, hand = asked("generated", "written"), asked("sessions_by_second_hand", "written")
    low, high = (generated["exact"] + sign * generated["interval"] for sign in (-1, 1))
    none = asked("generated", "not written")["exact"]
    later = asked("generated", "after 2,000 tokens of a book")
    return (
        "**Yes, in most cases, if the sentences are of the kind that it was trained on.**"
        " SmolLM2-135M-Instruct, frozen, with a memory trained alone, says"
        f" {generated['exact']:.2f} [{low:.2f}, {high:.2f}] of the answers exactly that an earlier"
        " session stated, in sentences, names and values that training never had, and"
        f" {none:.2f} when nothing was written; the model alone, with everything in its context,"
        f" says {base('generated')['exact']:.2f}. After 2,000 tokens of a book it is"
        f" {later['exact']:.2f}, in sessions written by hand {hand['exact']:.2f}. The aims (0.80"
        " and, after the book, 0.60) are missed."
    )


def table() -> str:
    """The sets of sessions: written, not written, all in the context."""
    rows = []
    for name, shown in SETS.items():
        one = asked(name, "written")
        about = f"{shown}: {one['of_sessions']}, {one['answers']} answers"
        none = asked(name, "not written")
        rows.append([about, share(one), share(none), share(base(name))])
    return markdown(["sessions", "written", "not written", BASE], rows)


def results() -> str:
    """What is left after other texts, told twice, corrected, and where it fails."""
    generated = {
        "told once": "told once (the same few sessions)",
        "told twice": "told twice",
        "after 50 other facts": "after fifty other facts",
        "after 2,000 tokens of a book": "after 2,000 tokens of a book",
    }
    rows = []
    for shown, condition in generated.items():
        plain = "" if shown == "told once" else share(asked("generated", condition + KEEPS))
        between = shown.startswith("after")
        none = asked("generated", f"{condition}, not told" if between else "not written")
        rows.append([shown, share(asked("generated", condition)), plain, share(none)])
    others = {
        "all facts corrected later: the new value": "corrected_new",
        "the same: the old value": "corrected_old",
        "all facts of one person": "owners_one",
        "of two people, one letter of their names apart": "owners_alike",
        "yes or no": "sessions_of_yes_and_no",
    }
    for shown, name in others.items():
        conditions = "written", f"written{KEEPS}", "not written"
        rows.append([shown, *(share(asked(name, one)) for one in conditions)])
    return markdown(["", "exact", "without the write that keeps", "not told"], rows)


def gains() -> str:
    """Ten conversations through `fwpkm chat`."""
    rows = []
    for talk in of("chat"):
        told = " ".join(talk["told"])
        for question, right, said, empty in zip(
            talk["asked"], talk["asked"].values(), talk["said"], talk["not_written"], strict=True
        ):
            mark = "**" if said.lower().startswith(right.lower()) else ""
            rows.append([told, question, f"{mark}{said}{mark}", empty])
            told = ""
    return markdown(["told", "asked in a new chat", "answer", "not told"], rows)


def costs() -> str:
    """Losses and tasks, base beside memory."""
    rows = [
        [
            f"loss of {line['books']} unseen books, 256 tokens each, {line['condition']}",
            f"{line['base']:.3f}",
            f"{line['more']:+.3f} ± {line['interval']:.3f} ({line['more'] / line['base']:.1%})",
        ]
        for line in of("loss of text")
    ]
    rows += [
        [f"{line['task']}, {line['questions']} questions", line["base"], line["memory"]]
        for line in of("task")
    ]
    return markdown(["", "model alone", "with the memory"], rows)
