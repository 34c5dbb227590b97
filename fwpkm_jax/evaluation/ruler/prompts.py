"""RULER's tasks as published: their sizes, prompts, and the number of tokens of an answer.

Prompts are part of the protocol and stand here as in the published configuration (Apache-2.0).
`{context}` ends the text; what follows it is the question, with the beginning of the answer.
"""

from __future__ import annotations

from typing import NamedTuple

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."


class Needles(NamedTuple):
    """A needle task: what the text around the needles is, and which needles there are."""

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


NEEDLE_TASKS = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", values="uuids"),
    "niah_multikey_1": Needles("essay", num_keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("essay", num_values=4),
    "niah_multiquery": Needles("essay", num_keys=4, num_queries=4),
}
QUESTION_TASKS = {"qa_1": "squad", "qa_2": "hotpotqa"}
"""The option that names the data of each task of questions."""
GENERATED_TASKS = (*NEEDLE_TASKS, "vt", "cwe", "fwe")
TASKS = (*GENERATED_TASKS, *QUESTION_TASKS)

ONE_NEEDLE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will "
    "quiz you about the {kind} afterwards.\n{context}",
    "\nWhat is the special magic {kind} for {query} mentioned in the provided text? The special "
    "magic {kind} for {query} mentioned in the provided text is",
)
NEEDLES = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the {kind} afterwards.\n{context}",
    "\nWhat are all the special magic {kind} for {query} mentioned in the provided text? The "
    "special magic {kind} for {query} mentioned in the provided text are",
)
TRACING = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}",
    "\nQuestion: Find all variables that are assigned the value {query} in the text above. Answer: "
    "According to the chain(s) of variable assignment in the text above, {number} variables are "
    "assigned the value {query}, they are: ",
)
COMMON_WORDS = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}",
    "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words "
    "that appear most often in the list are:",
)
FREQUENT_WORDS = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}",
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text? Answer: According to the coded text "
    "above, the three most frequently appeared words are:",
)
_ONLY = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\n"
)
DOCUMENTS = (
    _ONLY + "The following are given documents.\n\n{context}",
    "\n\n" + _ONLY + "Question: {query} Answer:",
)

NEW_TOKENS = (
    dict.fromkeys(NEEDLE_TASKS, 128)
    | {"vt": 30, "cwe": 120, "fwe": 50}
    | dict.fromkeys(QUESTION_TASKS, 32)
)
"""Tokens that are generated for an answer; they count as part of the length."""
