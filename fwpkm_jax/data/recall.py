"""A generated task: facts stated early in a document and asked for beyond any window."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fwpkm_jax.data.contract import AbstractDataConfig, Split
from fwpkm_jax.literals import Bound, Count, NotNegative, check_fields

Example = dict[str, np.ndarray]

# A generator has no last document; no run reaches this many.
_ENDLESS = 2**48
# Documents of different splits come from different children of the seed.
_STREAMS: dict[Split, int] = {"train": 0, "valid": 1}


@dataclass(frozen=True, kw_only=True)
class RecallData(AbstractDataConfig):
    """Documents that state facts among filler and later ask for them again; no files needed.

    A fact is a key token followed by a value token. A question is the same key again, and its
    answer, the label after it, is the value stated before. Keys within a document are distinct,
    each is asked for at most once, and values are drawn anew in every document, so slow weights can
    learn how to look facts up but not the facts themselves. Facts stand in the first part of a
    document and questions in the last; between the parts lies enough filler for every answer to be
    at least `min_distance` tokens from the value it repeats. Positions within the parts are random.

    Token ids come from three ranges that do not overlap: filler, keys, values, in this order.

    Example:
      >>> from fwpkm_jax import RecallData
      >>> RecallData(length=64, num_facts=4, num_keys=16, num_values=8, min_distance=16).vocab_size
      88
    """

    length: int = 256
    """Labels per document; a row holds one token more."""
    num_facts: Count = 16
    """Facts stated in a document."""
    num_questions: int | None = None
    """Facts asked for in a document, chosen at random; None asks for all of them."""
    num_keys: int = 64
    """Number of different key tokens; at least num_facts."""
    num_values: Annotated[int, Bound(2)] = 64
    """Number of different value tokens; a guess is right with probability 1 / num_values."""
    num_filler: Count = 64
    """Number of different filler tokens."""
    min_distance: Annotated[int, Bound(2)] = 96
    """Least distance in tokens from a stated value to the answer that repeats it. A stack of
    sliding windows reaches layers * (window - 1) tokens back; stay beyond that, and beyond the
    memory's chunk, since a chunk is written only once it has been read."""
    other_loss_weight: NotNegative = 0.0
    """Weight in the training loss of every label that is not an answer. Filler, keys and stated
    values are drawn at random, so what their loss adds beyond the token frequencies is noise."""
    num_valid: Count = 256
    """Documents in the validation split."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_keys < self.num_facts:
            raise ValueError(
                f"num_keys={self.num_keys} cannot give num_facts={self.num_facts} distinct keys; "
                "raise num_keys or lower num_facts."
            )
        if not 1 <= self.questions_per_document <= self.num_facts:
            raise ValueError(
                f"num_questions={self.num_questions} is not between 1 and "
                f"num_facts={self.num_facts}: each fact is asked for at most once."
            )
        needed = 2 * (self.num_facts + self.questions_per_document) + self.min_distance - 3
        if self.length < needed:
            raise ValueError(
                f"length={self.length} cannot hold num_facts={self.num_facts} facts and "
                f"{self.questions_per_document} questions min_distance={self.min_distance} apart; "
                f"raise length to {needed} or lower one of them."
            )

    @property
    def questions_per_document(self) -> int:
        """Questions in every document."""
        return self.num_facts if self.num_questions is None else self.num_questions

    @property
    def vocab_size(self) -> int:
        return self.num_filler + self.num_keys + self.num_values

    def source(self, *, split: Split, seed: int) -> "RecallSource":
        return RecallSource(self, split=split, seed=seed)

    @property
    def num_answers(self) -> int:
        return self.num_values

    @property
    def about(self) -> str:
        return (
            f"generated sequences of {self.length:,} tokens that state {self.num_facts} facts and "
            f"ask for them at least {self.min_distance} tokens later"
        )

    @property
    def first_key(self) -> int:
        """Lowest token id of a key."""
        return self.num_filler

    @property
    def first_value(self) -> int:
        """Lowest token id of a value."""
        return self.num_filler + self.num_keys


class RecallSource:
    """Random access to the documents of one split: each is a function of (seed, index) alone."""

    def __init__(self, config: RecallData, *, split: Split, seed: int):
        self._config = config
        self._stream = _STREAMS[split]
        self._seed = seed
        self._num_documents = _ENDLESS if split == "train" else config.num_valid

    def __len__(self) -> int:
        return self._num_documents

    def __getitem__(self, index: int) -> Example:
        """One document.

        Returns:
          `tokens`: int32 `[length + 1]`.
          `loss_weight`: float32 `[length]`, one weight per label `tokens[1:]`.
          `answer_distance`: int32 `[length]`; where the label answers a question, the number of
            tokens from the stated value to the label; 0 elsewhere.
        """
        config, num_questions = self._config, self._config.questions_per_document
        rng = np.random.default_rng(
            np.random.SeedSequence(self._seed, spawn_key=(self._stream, index))
        )
        tokens = rng.integers(config.num_filler, size=config.length + 1, dtype=np.int32)
        keys = config.first_key + rng.permutation(config.num_keys)[: config.num_facts]
        values = config.first_value + rng.integers(config.num_values, size=config.num_facts)

        # The last value ends the first part and the earliest answer is the second token of the
        # last part, so `gap` tokens of filler keep them min_distance apart. Both parts get the
        # same room beyond what they must hold.
        gap = config.min_distance - 2
        room = config.length + 1 - gap - 2 * (config.num_facts + num_questions)
        facts_end = 2 * config.num_facts + room // 2
        stated = _pair_positions(rng, config.num_facts, 0, facts_end)
        tokens[stated], tokens[stated + 1] = keys, values

        asked = rng.permutation(config.num_facts)[:num_questions]
        questions = _pair_positions(rng, num_questions, facts_end + gap, config.length + 1)
        tokens[questions], tokens[questions + 1] = keys[asked], values[asked]

        # The label at position p is token p + 1, so an answer is the label of its question's key.
        loss_weight = np.full(config.length, config.other_loss_weight, np.float32)
        loss_weight[questions] = 1
        answer_distance = np.zeros(config.length, np.int32)
        answer_distance[questions] = questions - stated[asked]
        return {"tokens": tokens, "loss_weight": loss_weight, "answer_distance": answer_distance}


def _pair_positions(rng: np.random.Generator, num_pairs: int, start: int, end: int) -> np.ndarray:
    """First positions of `num_pairs` pairs of tokens in `[start, end)`, sorted, none overlapping.

    Every arrangement is equally likely: choose positions with each pair shrunk to one token, then
    make room for the second tokens.
    """
    shrunk = np.sort(rng.permutation(end - start - num_pairs)[:num_pairs])
    return start + shrunk + np.arange(num_pairs)
