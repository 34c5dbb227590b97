"""A real model with the shipped memory: what an earlier session told it."""

from __future__ import annotations

from lab.findings.stored import Line, lines_of, markdown

LINES = "real_model_shipped_cpu.jsonl"
EARLIER = "real_model_cpu.jsonl"
"""Of the trainings, asked in PyTorch."""
KEEPS = ", without the write that keeps"
BASE = "the base, all in its context"


def asked(sessions: str, condition: str) -> Line:
    """The answers of a set of sessions under a condition, of the library."""
    (found,) = (
        line
        for line in lines_of(LINES)
        if line["what"] == "asked"
        and (line["sessions"], line["condition"]) == (sessions, condition)
    )
    return found


def in_pytorch(sessions: str, condition: str) -> Line:
    """The same, of PyTorch in bfloat16."""
    (found,) = (
        line
        for line in lines_of(EARLIER)
        if line["what"] == "asked"
        and line["memory"] == "attention"
        and (line["sessions_file"], line["condition"]) == (sessions, condition)
    )
    return found


def share(line: Line) -> str:
    return f"{line['exact']:.2f} ± {line['interval']:.2f}"


def answer() -> str:
    """The page's first paragraph."""
    written = asked("generated", "written")
    low, high = (written["exact"] + sign * written["interval"] for sign in (-1, 1))
    none = asked("generated", "not written")["exact"]
    later, fifty = (
        asked("generated", f"after {between}")["exact"]
        for between in ("2,000 tokens of a book", "fifty other facts")
    )
    alone = in_pytorch("generated", BASE)["exact"]
    hand = [in_pytorch(name, "written")["exact"] for name in ("by hand", "by hand, second")]
    return (
        "**Yes, in most cases, if the sentences are of the kind that it was trained on.**"
        " SmolLM2-135M-Instruct, frozen, with a memory trained alone, says"
        f" {written['exact']:.2f} [{low:.2f}, {high:.2f}] of the answers exactly that an earlier"
        " session stated, in sentences, names and values that training never had, and"
        f" {none:.2f} when nothing was written; the model alone, with everything in its context,"
        f" says {alone:.2f}. After 2,000 tokens of a book it is {later:.2f}, after fifty other"
        f" facts {fifty:.2f}, in sessions written by hand {hand[0]:.2f} and {hand[1]:.2f}. The aims"
        " (0.80, and 0.60 after the book) are missed."
    )


def results() -> str:
    """What is left after other texts, told twice, or corrected."""
    again = "told once (the same few sessions)"
    rows = []
    for sessions, shown, condition, none in (
        ("generated", "told once", "written", "not written"),
        ("generated", "the same, the first 24 sessions", again, "not written"),
        ("generated", "told twice", "told twice", "not written"),
        *(
            ("generated", one, one, f"{one}, not told")
            for one in ("after fifty other facts", "after 2,000 tokens of a book")
        ),
        ("corrected_new", "all facts corrected: the new value", "written", "not written"),
    ):
        plain = "not run" if condition == again else share(asked(sessions, condition + KEEPS))
        line = asked(sessions, condition)
        counts = f"{line['of_sessions']}, {line['answers']}"
        rows.append([shown, counts, share(line), plain, share(asked(sessions, none))])
    head = ["", "sessions, answers", "exact", "without the write that keeps", "not told"]
    return markdown(head, rows)


def notes() -> str:
    """What the write that keeps is good for."""
    fifty, new = (
        [asked(name, condition + end)["exact"] for end in ("", KEEPS)]
        for name, condition in (
            ("generated", "after fifty other facts"),
            ("corrected_new", "written"),
        )
    )
    assert fifty[0] > fifty[1]
    assert new[0] < new[1]
    return (
        f"The write that keeps (`Retention(relocation=4)`, shipped) holds {fifty[0]:.2f} instead of"
        f" {fifty[1]:.2f} after fifty other facts, and makes correcting harder: the new value is"
        f" said in {new[0]:.2f} instead of {new[1]:.2f}."
    )
