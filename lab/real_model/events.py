"""Relations made of verbs and nouns, so that forms of statements and questions hardly come twice.

`events.txt` has verbs with what may follow them, and nouns of people and things. A drawn relation
is what one of them makes: "N sold the lamp to V", asked as "Who did N sell the lamp to" or "Tell
me to whom N has sold the lamp".
"""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parent / "events.txt"
_ADVERBS = ["", "", "", "just ", "also ", "finally ", "once ", "really ", "probably "]
_DETERMINERS = ["the ", "the ", "a ", "some ", "an old ", "two ", "this ", ""]
_ASKED = {
    "word": ["what", "what", "which thing", "what exactly", "what kind of thing"],
    "thing": ["what", "which thing", "what exactly"],
    "name": ["who", "who", "whom", "which person", "who exactly"],
    "place": ["where", "which place", "what place", "which town"],
    "number": ["how much", "which number", "what amount", "what number"],
    "date": ["when", "which day", "what date", "which date"],
}
_INDIRECT = [
    *("Tell me W", "Do you know W", "Can you say W", "Remember W", "I forgot W", "I wonder W"),
    *("Could you tell me W", "Say W", "Have I told you W", "I would like to know W"),
    *("Do you remember W", "Does anybody know W", "Please look up W", "Let me know W"),
]
_SUBJECTS = ["P R", "the R of N", "P own R", "the R that N has", "the R N told me about"]
_LINKS = [
    *("is V", "was V", "will be V", "has always been V", "must be V", "seems to be V", "stays V"),
    *("should be V", "became V", "is still V", "is now V", "could only be V", "equals V", "= V"),
    *(": V", "is known to be V", "is listed as V", "was changed to V", "is said to be V"),
]
_NOUN_STATEMENTS = [
    *("N has V as R", "N got V for a R", "N chose V as the R", "N gave V as the R"),
    *("N calls the R V", "N mentioned the R, V", "N showed me the R, V", "N's entry under R: V"),
    *("R of N - V", "R (N): V", "under R, N wrote V", "the form of N says R: V", "N, R V"),
    *("with N the R is always V", "N's answer for R was V", "N put down the R as V"),
]
_NOUN_QUESTIONS = [
    *("W is S", "W was S", "W would be S", "What did you note as S", "Tell me S", "And S"),
    *("Do you know S", "Do you remember S", "Give me S", "Can you name S", "I need S"),
    *("Repeat S", "Look up S", "What do you have for S", "Which one is S", "Any idea about S"),
    *("I want to know S", "Say S", "Could you look up S", "Show me S", "Do you still have S"),
    *("Which R does N have", "Which R belongs to N", "Which R did N mention", "N's R"),
    *("What does N have as R", "What stands under R for N", "Which R did N give", "R of N"),
]
_WISHES = ["want", "plan", "hope", "like", "need", "refuse", "promise"]
_DOUBLED = {"put", "sit", "swim", "run", "swap"}


def fill(form: str, **parts: str) -> str:
    """The form with its letters replaced; a letter counts where no other stands beside it."""
    names = "|".join(parts)
    return re.sub(rf"(?<!\w)({names})(?!\w)", lambda match: parts[match[1]], form)


class Relation(NamedTuple):
    """What can be said of an owner.

    Attributes:
      owner: p, a person, t, a thing, or I.
      kind: of the value: word, two, name, number, date.
      nouns: that name it; of a verb, one that only tells it from others.
      statements: forms with the owner as N or P, and the value as V.
      questions: forms without their mark.
      has_noun: whether general forms can be used.
    """

    owner: str
    kind: str
    nouns: list[str]
    statements: list[str]
    questions: list[str]
    has_noun: bool = True


class _Verb(NamedTuple):
    base: str
    past: str
    participle: str
    object: str
    follow: list[tuple[str, str]]


class Relations:
    """Draws relations.

    Args:
      wanted: whether a form may be used.
      thing: draws a noun that stands in a sentence.
      name: draws a name.
    """

    def __init__(
        self,
        wanted: Callable[[str], bool],
        thing: Callable[[random.Random], str],
        name: Callable[[random.Random], str],
    ) -> None:
        self._wanted, self._thing, self._name = wanted, thing, name
        self._verbs: list[_Verb] = []
        self._nouns: list[tuple[str, str, str]] = []
        verbs, _, nouns = FILE.read_text().partition("[noun]\n")
        for line in verbs.splitlines():
            if not line.startswith("#"):
                forms, kind, follow = line.split(" | ")
                pairs = [tuple(pair.split(":")) for pair in follow.split(", ") if pair != "-"]
                self._verbs.append(_Verb(*forms.split(), kind, pairs))  # pyright: ignore
        for line in nouns.splitlines():
            owner, kind, noun = line.split(" ", 2)
            self._nouns.append((owner, kind, noun))

    def draw(self, rng: random.Random) -> Relation:
        """A relation with a few forms that may be used."""
        while True:
            if rng.random() < 0.6:
                make, name, head = self._of_verb(rng)
            else:
                make, name, head = self._of_noun(rng)
            pairs = [make() for _ in range(6)]
            statements = [one for one, _ in pairs if self._wanted(one)]
            questions = [one for _, one in pairs if self._wanted(one)]
            if statements and questions:
                owner, kind = head
                return Relation(owner, kind, [name], statements, questions, has_noun=False)

    def _of_noun(self, rng: random.Random) -> tuple:
        owner, kind, noun = rng.choice(self._nouns)
        if rng.random() < 0.25:
            noun = self._thing(rng)  # Any word can be what somebody has.

        def make() -> tuple[str, str]:
            if rng.random() < 0.6:
                link = rng.choice(_LINKS)
                statement = rng.choice(_SUBJECTS) + (" " if link[0] != ":" else "") + link
            else:
                statement = rng.choice(_NOUN_STATEMENTS)
            asked = rng.choice(["What", _ASKED[kind][0].capitalize()])
            form = fill(rng.choice(_NOUN_QUESTIONS), S=rng.choice(_SUBJECTS), W=asked)
            return fill(statement, R=noun), fill(form, R=noun)

        return make, noun, (owner, kind)

    def _of_verb(self, rng: random.Random) -> tuple:
        verb = rng.choice(self._verbs)
        first_person = rng.random() < 0.15
        places = list(range(len(verb.follow))) + [-1] * (verb.object != "-")
        asked = rng.choice(places)
        what = rng.choice(_DETERMINERS) + self._thing(rng)
        thing = {"word": what, "name": self._name(rng), "-": ""}[verb.object]
        preposition, kind = verb.follow[asked] if asked >= 0 else ("", verb.object)
        value_kind = {"thing": "word", "place": "name"}.get(kind, kind)

        def make() -> tuple[str, str]:
            time = rng.choice(["past", "past", "future", "now", "want"])
            said, direct = _phrase(rng, verb, time), _phrase(rng, verb, time, question=True)
            if first_person:
                said, direct = _of_me(verb, said), (_of_me(verb, direct[0]), direct[1])
            adverb = rng.choice(_ADVERBS)
            if asked < 0:
                statement = f"N {_with_adverb(said, adverb)} V"
                where, behind = "", ""
            else:
                middle = f" {thing}" if thing else ""
                statement = f"N {_with_adverb(said, adverb)}{middle} {preposition} V"
                keep = rng.random() < 0.7 or not thing
                behind = (middle if keep else " it") if thing else ""
                where = "" if kind in ("place", "date", "thing") else preposition
            word = rng.choice(_ASKED[kind])
            if kind in ("place", "date", "thing") and word not in ("where", "when"):
                where = preposition
            first = bool(where) and rng.random() < 0.35
            lead = f"{where} {word}" if first else word
            if first:
                lead, where = lead.replace("who", "whom").replace("whomm", "whom"), ""
            if rng.random() < 0.6:
                auxiliary, rest = direct
                question = f"{lead} {auxiliary} N {rest}{behind} {where}".rstrip()
                question = question[0].upper() + question[1:]
            else:
                said = _phrase(rng, verb, time)
                said = _of_me(verb, said) if first_person else said
                clause = f"{lead} N {said}{behind} {where}".rstrip()
                question = fill(rng.choice(_INDIRECT), W=clause)
            return statement, question

        return make, f"{verb.base} {preposition}", ("I" if first_person else "p", value_kind)


def _phrase(rng: random.Random, verb: _Verb, time: str, *, question: bool = False) -> Any:
    """What N does, or of a direct question the words before N and behind it."""
    third = _third(verb.base)
    if time == "past":
        options = [
            ("did", verb.base, verb.past),
            ("has", verb.participle, f"has {verb.participle}"),
        ]
    elif time == "future":
        options = [
            ("will", verb.base, f"will {verb.base}"),
            ("is", f"going to {verb.base}", f"is going to {verb.base}"),
        ]
    elif time == "now":
        options = [
            ("does", verb.base, third),
            ("is", _progressive(verb.base), f"is {_progressive(verb.base)}"),
        ]
    else:
        wish = rng.choice(_WISHES)
        options = [("does", f"{wish} to {verb.base}", f"{_third(wish)} to {verb.base}")]
    auxiliary, rest, said = rng.choice(options)
    return (auxiliary, rest) if question else said


def _of_me(verb: _Verb, said: str) -> str:
    """Words about somebody, of the speaker."""
    first, space, rest = said.partition(" ")
    mine = {"is": "am", "has": "have", "does": "do", _third(verb.base): verb.base}
    mine |= {_third(wish): wish for wish in _WISHES}
    return mine.get(first, first) + space + rest


def _with_adverb(said: str, adverb: str) -> str:
    first, _, rest = said.partition(" ")
    return (
        f"{first} {adverb}{rest}" if first in ("has", "have", "will", "is", "am") else adverb + said
    )


def _third(base: str) -> str:
    if base.endswith("y") and base[-2] not in "aeiou":
        return base[:-1] + "ies"
    return base + ("es" if base.endswith(("s", "sh", "ch", "x", "o")) else "s")


def _progressive(base: str) -> str:
    if base in _DOUBLED:
        return base + base[-1] + "ing"
    return (base[:-1] if base.endswith("e") and not base.endswith("ee") else base) + "ing"
