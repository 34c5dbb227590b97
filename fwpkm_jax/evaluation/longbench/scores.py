"""LongBench's scores of an answer, from their definitions.

References: Bai et al. 2023, arXiv:2308.14508; Lin 2004, "ROUGE: a package for automatic evaluation
of summaries" (ROUGE-L); Rajpurkar et al. 2016, arXiv:1606.05250 (F1 over words).
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def word_f1(answer: str, reference: str) -> float:
    """F1 of the words of an answer, without case, punctuation and articles."""
    said, right = (_plain_words(text) for text in (answer, reference))
    common = sum((Counter(said) & Counter(right)).values())
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(right)
    return 2 * precision * recall / (precision + recall)


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L's F1 over sentences, as the package `rouge` 1.0.1 defines it for LongBench.

    A reference sentence is matched by the union of its longest common subsequences with the
    answer's sentences. Words are counted once however often they stand in a text.
    """
    said, right = (_sentences(text) for text in (answer, reference))
    if not said or not right:
        return 0.0
    matched: set[str] = set()
    for own in right:
        for other in said:
            matched |= _common_words(own, other)
    words = [len({word for one in text for word in one}) for text in (right, said)]
    recall, precision = (len(matched) / number for number in words)
    return 2 * precision * recall / (precision + recall + 1e-8)


def named_class(answer: str, reference: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that an answer names, if the right one is among them.

    A class whose name is a part of the right one's does not count. As in the published program, the
    class behind one that is left out is not examined.
    """
    named = [one for one in classes if one in answer]
    place = 0
    while place < len(named):
        if named[place] in reference and named[place] != reference:
            del named[place]
        place += 1
    return 1.0 / len(named) if reference in named else 0.0


def same_number(answer: str, reference: str) -> float:
    """The share of the numbers in an answer that are the reference's last one.

    The reference is a number, or text that names a paragraph ("Paragraph 7").
    """
    right = re.findall(r"\d+", reference)
    said = re.findall(r"\d+", answer)
    return sum(one == right[-1] for one in said) / len(said) if said and right else 0.0


def code_similarity(answer: str, reference: str) -> float:
    """How alike the first line of code of an answer and the reference are, rounded to percent.

    The first line counts that has no backquote, `#` or `//`. The measure is twice the characters
    of matching blocks over the characters of both (`difflib`), as in fuzzywuzzy.
    """
    lines = answer.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(mark in x for mark in ("`", "#", "//"))), "")
    if line == reference:
        return 1.0
    if not line or not reference:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def _plain_words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def _sentences(text: str) -> list[list[str]]:
    """Words by sentence; as in the package, spaces between two full stops are an empty word."""
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def _common_words(reference: Sequence[str], answer: Sequence[str]) -> set[str]:
    """The words of a longest common subsequence.

    Of several, the one that is found from the ends, where a step back in the answer comes first.
    """
    lengths = np.zeros((len(reference) + 1, len(answer) + 1), np.int32)
    for row, word in enumerate(reference, 1):
        same = np.array([word == other for other in answer], np.int32)
        # With the best of the row above; then each entry is at least the one before it.
        found = np.maximum(lengths[row - 1, 1:], (lengths[row - 1, :-1] + 1) * same)
        lengths[row, 1:] = np.maximum.accumulate(found)
    words, row, column = set(), len(reference), len(answer)
    while row and column:
        if reference[row - 1] == answer[column - 1]:
            words.add(reference[row - 1])
            row, column = row - 1, column - 1
        elif lengths[row - 1, column] > lengths[row, column - 1]:
            row -= 1
        else:
            column -= 1
    return words
