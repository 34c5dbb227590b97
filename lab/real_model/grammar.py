"""Sessions of facts in wordings that do not come twice: what is told, and what is asked later.

A session tells facts about people and things in one row and asks for them in another. Sentences are
made of a relation's own forms or general ones, openings, tails and texts between; names and values
are words of a tokenizer, made-up names, numbers and dates. `relations.txt` and `phrases.txt` hold
the forms, `passages.txt` whole texts of several facts. A form or word belongs to training or to
the test, by the checksum of its text.

    python -m lab.real_model.grammar --tokenizer FILE --books FILE --out FILE --sessions 1000

writes sessions as `fwpkm_jax.data.sessions` reads them.
"""

import json
import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.options import parse
from lab.real_model.events import Relation, Relations, fill
from lab.real_model.passages import PASSAGES, draws, fill_passage, read_passages

FOLDER = Path(__file__).parent
_MONTHS = "January February March April May June July August September October November December"
_SYLLABLES = [
    "ba",
    "bel",
    "cor",
    "da",
    "dri",
    "el",
    "fen",
    "ga",
    "hal",
    "il",
    "jo",
    "ka",
    "lin",
    "lo",
    "mar",
    "mi",
    "na",
    "nor",
    "o",
    "pe",
    "qui",
    "ra",
    "ri",
    "sa",
    "sel",
    "ta",
    "tor",
    "u",
    "va",
    "vin",
    "wen",
    "xa",
    "ya",
    "zo",
]
_TITLES = "Mr ", "Mrs ", "Dr ", "Miss ", "Professor ", "uncle ", "aunt "
_ARTICLES = (
    *("a ", "the ", "the ", "his ", "her ", "in the ", "near the ", "by the ", "only ", "two "),
    *("some ", "an old ", "a new ", "behind the ", "with a ", "the red ", "five ", "on "),
)
_JOINTS = ["and", "and", "but", "while", "because", "though", "so"]
Owners = Literal["some", "one", "alike"]
Corrected = Literal["some", "new", "old"]
TEST_SHARE = 5
"""One form or word of so many is kept for the test."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Writes sessions of facts."""

    tokenizer: Path
    """A tokenizer.json, whose words are names and values."""
    books: Path
    """JSON lines of texts, whose sentences stand between."""
    out: Path
    """JSON lines of sessions."""
    sessions: int = 1000
    """Of this number."""
    seed: str = "train"
    """Of all draws."""
    new_forms: bool = False
    """Forms that are kept apart for the test."""
    new_words: bool = False
    """Names and values that are kept apart for the test."""
    wide: float = 0.0
    """Share of relations of drawn verbs and nouns, for training."""
    passages: float = 0.0
    """Share of sessions that tell passages."""
    owners: Owners = "some"
    """Whose facts a session tells: those of some people and things, of one person, or the same
    facts of two people whose names differ in one letter."""
    corrected: Corrected = "some"
    """Which facts are corrected after all have been told: some, as in training, or all, which are
    then asked for the new value, or for the old one."""


@dataclass(frozen=True)
class Fact:
    """A statement: `text` up to the value, the value, and the rest."""

    before: str
    value: str
    after: str


@dataclass(frozen=True)
class Question:
    """A question for the value of the fact with this number, or of a passage, behind `about`."""

    text: str
    answer: str
    fact: int
    about: str = ""


@dataclass(frozen=True)
class Session:
    """What is told, with texts between, and what is asked."""

    told: list[Fact | str]
    asked: list[Question]
    told_in_chat: bool
    asked_in_chat: bool


def kept(text: str) -> bool:
    """Whether a form or word is kept for the test."""
    return zlib.crc32(text.encode()) % TEST_SHARE == 0


class Grammar:
    """Draws sessions.

    Args:
      tokenizer_json: whose words are names and values.
      books: sentences that may stand between facts.
      new_forms: sentences of the test, not of training.
      new_words: names and values of the test, not of training.
      wide: share of relations of drawn verbs and nouns.
      passages: share of sessions that tell passages.
      owners: see `Options`.
      corrected: see `Options`.
    """

    def __init__(
        self,
        tokenizer_json: Path,
        books: list[str],
        *,
        new_forms: bool,
        new_words: bool,
        wide: float = 0.0,
        passages: float = 0.0,
        owners: Owners = "some",
        corrected: Corrected = "some",
    ) -> None:
        self._owners, self._corrected = owners, corrected
        vocabulary = json.loads(tokenizer_json.read_text())["model"]["vocab"]
        # The marker of a token that begins with a space.
        words = sorted(token[1:] for token in vocabulary if token.startswith("\u0120"))
        words = [word for word in words if kept(word) == new_words]
        self._low = [word for word in words if re.fullmatch("[a-z]{4,9}", word)]
        self._high = [word for word in words if re.fullmatch("[A-Z][a-z]{3,8}", word)]
        self._books = books

        def chosen(forms: list[str]) -> list[str]:
            return [form for form in forms if kept(form) == new_forms]

        parts = _parts((FOLDER / "phrases.txt").read_text())
        whole = ("thing", "filler", "acknowledgement", "chat question", "plain question")
        self._parts = {
            name: forms if name in whole else chosen(forms) for name, forms in parts.items()
        }
        # Without a form of their own split, the speaker's own facts are left out.
        self._has_own = bool(self._parts["my statement"] and self._parts["my question"])
        self._relations = [
            one._replace(statements=chosen(one.statements), questions=chosen(one.questions))
            for one in _relations((FOLDER / "relations.txt").read_text())
        ]
        self._wide, self._passage_share = wide, passages
        self._passages = [
            one for one in read_passages(PASSAGES.read_text()) if kept(one.text) == new_forms
        ]
        self._slots = draws(self._thing_word, lambda rng: rng.choice(self._high), self._name)
        self._drawn = Relations(lambda form: kept(form) == new_forms, self._thing_word, self._name)

    def session(self, rng: random.Random, *, facts: int, asked: int, chat: float) -> Session:
        """One session.

        Args:
          rng: draws it.
          facts: how many are told.
          asked: most questions.
          chat: share of rows that are conversations.
        """
        if self._passage_share and rng.random() < self._passage_share:
            return self._of_passages(rng, facts, asked, chat)
        people = [self._name(rng) for _ in range(rng.randint(2, 5))]
        if self._owners != "some":
            people = people[:1]
        if self._owners == "alike":
            people.append(_like(people[0], rng))
        things = [
            fill(rng.choice(self._parts["thing"]), X=self._thing(rng))
            for _ in range(rng.randint(1, 2))
        ]
        pairs: dict[tuple[str, str], Relation] = {}
        while len(pairs) < facts:
            if self._wide and rng.random() < self._wide:
                relation = self._drawn.draw(rng)
            else:
                relation = rng.choice(self._relations)
            if pairs and rng.random() < (0.7 if self._owners == "alike" else 0.3):
                relation = rng.choice(list(pairs.values()))  # The same of two owners.
            if self._owners != "some" and relation.owner != "p":
                continue
            owner = rng.choice(people if relation.owner == "p" else things)
            if relation.owner == "I":
                owner = "I"
            if (
                self._has_own
                and self._owners == "some"
                and relation.has_noun
                and relation.owner == "p"
                and rng.random() < 0.12
            ):
                owner = "my"
            pairs.setdefault((owner, relation.nouns[0]), relation)
        told: list[Fact | str] = []
        latest: dict[tuple[str, str], int] = {}
        order = list(pairs)
        if rng.random() < 0.5:
            order.sort(key=lambda pair: pair[0])  # What is said of one stands together.
        elif self._wide and rng.random() < 0.5:
            order.sort(key=lambda pair: pair[1])  # The same of several.
        pronouns = {owner: rng.choice([("he", "his"), ("she", "her")]) for owner in people}
        before = None
        for pair in order:
            if rng.random() < 0.3:
                told.append(self._between(rng))
                before = None
            latest[pair] = len(told)
            same = before is not None and before[0] == pair[0]
            pronoun = pronouns.get(pair[0]) if same and rng.random() < 0.6 else None
            value = self._value(rng, pairs[pair].kind)
            joined = bool(self._wide) and before is not None and rng.random() < 0.5
            if joined and before is not None and before[1] == pair[1]:
                self._add_gapped(rng, told, pair[0], value)
            elif joined and pronoun is not None:
                fact = self._fact(rng, pair[0], pairs[pair], value, rng.choice(_JOINTS), pronoun)
                self._add_joined(rng, told, fact, pronoun)
            else:
                told.append(self._fact(rng, pair[0], pairs[pair], value, "", pronoun))
            before = pair
        first = dict(latest)
        for pair, relation in pairs.items():
            draw = rng.random() if self._corrected == "some" else 0.05
            if draw < 0.04:
                fact = told[latest[pair]]
                assert isinstance(fact, Fact)
                latest[pair] = len(told)
                told.append(self._fact(rng, pair[0], relation, fact.value, ""))
            elif draw < 0.08:
                change = rng.choice(["No,", "Actually,", "Correction:", "Sorry,", "Wait,"])
                latest[pair] = len(told)
                told.append(
                    self._fact(rng, pair[0], relation, self._value(rng, relation.kind), change)
                )
        questions = []
        asked_in_chat = rng.random() < chat
        for pair in rng.sample(list(pairs), min(asked, len(pairs))):
            place = (first if self._corrected == "old" else latest)[pair]
            fact = told[place]
            assert isinstance(fact, Fact)
            same = not asked_in_chat and rng.random() < 0.25 and self._corrected == "some"
            # A statement may lack its subject, which is then sought by its other words.
            named = self._wide or self._owners != "some"
            same = same and (not named or pair[0] in fact.before)
            text = fact.before if same else self._question(rng, pair[0], pairs[pair], asked_in_chat)
            questions.append(Question(text, fact.value, place))
        return Session(told, questions, rng.random() < chat, asked_in_chat)

    def _of_passages(self, rng: random.Random, facts: int, asked: int, chat: float) -> Session:
        """A session that tells passages; its arguments are those of `session`."""
        told: list[Fact | str] = []
        questions: list[Question] = []
        asked_in_chat = rng.random() < chat
        for passage in rng.sample(self._passages, len(self._passages)):
            if len(questions) >= facts:
                break
            text, answers = fill_passage(passage, rng, self._slots)
            if rng.random() < 0.2:
                told.append(self._between(rng))
            for one in answers:
                frame = self._parts["chat question" if asked_in_chat else "plain question"]
                text_of = fill(rng.choice(frame), Q=one.question)
                questions.append(Question(text_of, one.answer, len(told), one.about))
            told.append(text)
        questions = rng.sample(questions, min(asked, len(questions)))
        return Session(told, questions, rng.random() < chat, asked_in_chat)

    def _add_joined(
        self, rng: random.Random, told: list[Fact | str], fact: Fact, pronoun: tuple[str, str]
    ) -> None:
        """Adds a fact to the sentence before, at times without its subject."""
        last = told[-1]
        assert isinstance(last, Fact)
        told[-1] = replace(last, after=last.after[:-1] + rng.choice([",", ""]))
        joint, _, rest = fact.before.partition(" ")
        if rest.startswith(f"{pronoun[0]} ") and rng.random() < 0.5:
            rest = rest.removeprefix(f"{pronoun[0]} ")
            joint = rng.choice(["", joint])
        told.append(replace(fact, before=f"{joint[:1].lower()}{joint[1:]} {rest}".strip()))

    def _add_gapped(
        self, rng: random.Random, told: list[Fact | str], owner: str, value: str
    ) -> None:
        """Adds the same fact of another owner, without the words that both share."""
        last = told[-1]
        assert isinstance(last, Fact)
        told[-1] = replace(last, after=rng.choice([",", ";", " and", ""]))
        words = owner + rng.choice(["", "", ",", ":"])
        if rng.random() < 0.4:
            words += f" {last.before.split()[-1]}"
        told.append(Fact(words, value, rng.choice([".", ".", ";"])))

    def _fact(
        self,
        rng: random.Random,
        owner: str,
        relation: Relation,
        value: str,
        opening: str,
        pronoun: tuple[str, str] | None = None,
    ) -> Fact:
        if owner == "my":
            form = rng.choice(self._parts["my statement"])
        elif relation.statements and (not relation.has_noun or rng.random() < 0.6):
            form = rng.choice(relation.statements)
        else:
            form = rng.choice(self._parts["own statement"])
        form = fill(form, R=rng.choice(relation.nouns))
        if not opening and rng.random() < 0.5:
            opening = rng.choice(self._parts["opening"])
        if pronoun is not None:
            text = fill(form, P=pronoun[1], N=pronoun[0])
        else:
            text = fill(form, P=_possessive(rng, owner), N=owner)
        text = f"{opening} {text}" if opening else text
        text = text[0].upper() + text[1:]
        before, after = re.split(r"(?<!\w)V(?!\w)", text, maxsplit=1)
        tail = rng.choice(self._parts["tail"]) if not after and rng.random() < 0.3 else ""
        return Fact(before.rstrip(), value, after + tail + rng.choice([".", ".", ".", "!", ";"]))

    def _question(self, rng: random.Random, owner: str, relation: Relation, chat: bool) -> str:
        if owner == "my":
            form = rng.choice(self._parts["my question"])
        elif relation.questions and (not relation.has_noun or rng.random() < 0.7):
            form = rng.choice(relation.questions)
        else:
            form = rng.choice(self._parts["own question"])
        form = fill(form, R=rng.choice(relation.nouns))
        text = fill(form, P=_possessive(rng, owner), N=owner)
        frame = rng.choice(self._parts["chat question" if chat else "plain question"])
        return fill(frame, Q=text)

    def _between(self, rng: random.Random) -> str:
        if rng.random() < 0.5:
            return rng.choice(self._parts["filler"])
        return rng.choice(self._books)

    def _made_up(self, rng: random.Random) -> str:
        return "".join(rng.choices(_SYLLABLES, k=rng.randint(2, 3))).capitalize()

    def _name(self, rng: random.Random) -> str:
        draw = rng.random()
        first = self._made_up(rng) if draw < 0.2 else rng.choice(self._high)
        return f"{first} {rng.choice(self._high)}" if rng.random() < 0.2 else first

    def _thing(self, rng: random.Random) -> str:
        draw = rng.random()
        if draw < 0.2:
            return str(rng.randint(2, 99))
        return rng.choice(self._low if draw < 0.6 else self._high)

    def _thing_word(self, rng: random.Random) -> str:
        return rng.choice(self._low)

    def _value(self, rng: random.Random, kind: str) -> str:
        if kind == "number":
            if rng.random() < 0.2:
                return f"{rng.choice('ABCDEFGHJKLMNPRSTUVWXYZ')}{rng.randint(1, 99)}"
            return "".join(rng.choices("0123456789", k=rng.randint(2, 4)))
        if kind == "date":
            return f"{rng.choice(_MONTHS.split())} {rng.randint(1, 31)}"
        if kind == "two":
            return f"{rng.choice(self._low)} {rng.choice(self._low)}"
        if kind == "name":
            return rng.choice(_TITLES) * (rng.random() < 0.15) + self._name(rng)
        return rng.choice(_ARTICLES) * (rng.random() < 0.4) + rng.choice(self._low)


def _like(name: str, rng: random.Random) -> str:
    """A name with another last letter."""
    letters = [x for x in "aeionrs" if x != name[-1]]
    return name[:-1] + rng.choice(letters)


def _possessive(rng: random.Random, owner: str) -> str:
    if owner in ("my", "I"):
        return "my"
    return owner + ("'" if owner.endswith("s") and rng.random() < 0.3 else "'s")


def _parts(text: str) -> dict[str, list[str]]:
    parts: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if heading := re.fullmatch(r"\[(.*)\]", line):
            name = heading[1]
            parts[name] = []
        elif line and not line.startswith("#"):
            parts[name].append(line)
    return parts


def _relations(text: str) -> list[Relation]:
    """Owner's kind, value's kind, nouns, statements and questions of each relation."""
    relations: list[Relation] = []
    for line in text.splitlines():
        if line.startswith("="):
            kinds, *nouns = line[1:].split("|")
            owner, kind = kinds.split()
            relations.append(Relation(owner, kind, [noun.strip() for noun in nouns], [], []))
        elif line.startswith("+"):
            relations[-1].statements.append(line[2:])
        elif line.startswith("?"):
            relations[-1].questions.append(line[2:].rstrip("?"))
    return relations


def record(session: Session, rng: random.Random) -> dict[str, Any]:
    """The session as a record of a file of sessions."""
    pieces = [
        one if isinstance(one, str) else f"{one.before} {one.value}{one.after}"
        for one in session.told
    ]
    if session.told_in_chat:
        messages = []
        while pieces:
            said = [pieces.pop(0) for _ in range(min(len(pieces), rng.randint(1, 3)))]
            messages.append({"role": "user", "content": " ".join(said)})
            messages.append({"role": "assistant", "content": "OK."})
        told: dict[str, Any] = {"messages": messages}
    else:
        told = {"text": " ".join(pieces)}
    if session.asked_in_chat:
        messages = []
        for question in session.asked:
            messages.append({"role": "user", "content": question.text})
            answer = {"role": "assistant", "content": f" {question.answer}"}
            messages.append(answer | ({"about": question.about} if question.about else {}))
        return {"rows": [told, {"messages": messages}]}
    questions = []
    for question in session.asked:
        told_by = session.told[question.fact]
        about = told_by.before if isinstance(told_by, Fact) else question.about
        questions.append(
            {"question": question.text, "answer": f" {question.answer}", "about": about}
        )
    return {"rows": [told, {"questions": questions}]}


def sentences(books: Path) -> list[str]:
    """Sentences of 30 to 110 characters of books in JSON lines."""
    found: list[str] = []
    for line in books.read_text().splitlines():
        text = " ".join(json.loads(line)["text"].split())
        found += [x for x in re.split(r"(?<=[.!?]) ", text) if 30 <= len(x) <= 110]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Writes a file of sessions."""
    options = parse(Options, argv)
    grammar = Grammar(
        options.tokenizer,
        sentences(options.books),
        new_forms=options.new_forms,
        new_words=options.new_words,
        wide=options.wide,
        passages=options.passages,
        owners=options.owners,
        corrected=options.corrected,
    )
    with options.out.open("w") as file:
        for number in range(options.sessions):
            rng = random.Random(f"{options.seed}-{number}")
            session = grammar.session(rng, facts=rng.randint(8, 10), asked=8, chat=0.5)
            file.write(json.dumps(record(session, rng), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
