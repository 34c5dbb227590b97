"""Options of the needle evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fwpkm_jax.evaluation.readers.fast_weight_dtype import FastWeightDtype
from fwpkm_jax.literals import check_literals

# Words of the longest haystack that each factor serves; beyond them the last one.
_PAPER_FACTORS = ((4000, None), (8000, 4.0), (16_000, 8.0), (32_000, 16.0), (128_000, 64.0))


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """What is hidden in a haystack and where."""

    num_needles: int = 5
    """Needles per haystack, one of which is asked for."""
    key_characters: int = 4
    """Hexadecimal characters of a needle's key."""
    value_digits: int = 6
    """Digits of a needle's number, and tokens decoded for an answer."""
    depths: tuple[float, ...] = ()
    """Depths in percent that targets take turns at. Empty: uniform over the haystack."""

    def __post_init__(self) -> None:
        check_literals(self)
        for name in ("num_needles", "key_characters", "value_digits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if any(not 0 <= depth <= 100 for depth in self.depths):
            raise ValueError(f"depths={self.depths} must be percentages from 0 to 100.")


@dataclass(frozen=True, kw_only=True)
class NeedleConfig(SampleSettings):
    """Needle in a haystack."""

    data: tuple[str, ...] = ()
    """Files or folders of text for the haystacks. Empty: the run's validation text."""
    sample_files: tuple[str, ...] = ()
    """Files of samples, a length each, instead of samples made here; see evaluation.needle.files.
    They replace the options of samples: data, haystack_words, num_needles, key_characters,
    value_digits, depths."""
    haystack_words: tuple[int, ...] = (4000,)
    """Whitespace words of a haystack; each length is an evaluation of its own."""
    readings: tuple[int, ...] = (1, 2, 3, 4)
    """How often the haystack is read before the answer; each number starts afresh."""
    samples: int = 500
    """Haystacks per length, fewer where the text runs out."""
    mode: Literal["paper", "reference"] = "paper"
    """paper: the last reading is written, then the question is read. reference: the question is
    read together with the haystack, before the write, as in the release."""
    write: bool = True
    """Write the readings into the memory. Off: it stays as the checkpoint has it."""
    chunk_size: int | Literal["text", "model"] = "text"
    """Tokens per write. text: one write per reading, of all its tokens. model: the model's own, as
    in training, which FwMLP may need, since one step on a whole text can diverge. LaCT always
    keeps its own."""
    reset_memory_between_samples: bool = False
    """Each sample starts from the checkpoint's memory. Off, as in paper and release: what earlier
    samples wrote stays, their needles too."""
    fast_weight_dtype: FastWeightDtype = "float32"
    """Precision of fast weights between two writes; bfloat16 imitates the release."""
    yarn_factor: Literal["paper"] | float | None = "paper"
    """Stretches rotary positions. paper: by the words of the haystack, not at all up to 4000, by 4
    up to 8000, by 8 up to 16,000, by 16 up to 32,000, by 64 beyond. None: as trained."""
    yarn_original_length: int = 1024
    """Original context of the stretching; the release says 1024 though it trained on 4096."""
    piece_length: int = 512
    """Tokens read per call; bounds the memory needed and changes no number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("haystack_words", "readings"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"{name}={values} must name numbers of at least 1.")
        for name in ("samples", "piece_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if isinstance(self.chunk_size, int) and self.chunk_size < 1:
            raise ValueError(f"chunk_size={self.chunk_size} must be at least 1.")

    def factor(self, words: int) -> float | None:
        """YaRN's factor for haystacks of so many words."""
        if self.yarn_factor != "paper":
            return self.yarn_factor
        fitting = [factor for most, factor in _PAPER_FACTORS if words <= most]
        return fitting[0] if fitting else _PAPER_FACTORS[-1][1]
