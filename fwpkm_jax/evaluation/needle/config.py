"""Options of the needle evaluation."""

from dataclasses import dataclass
from typing import Literal

from fwpkm_jax.literals import Count, Natural, check_fields

# Largest haystack in words for each factor; longer haystacks use the last factor.
_PAPER_FACTORS = ((4000, None), (8000, 4.0), (16_000, 8.0), (32_000, 16.0), (128_000, 64.0))


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """What is hidden in a haystack and where."""

    num_needles: Count = 5
    """Needles per haystack, one of which is asked for."""
    key_characters: Count = 4
    """Hexadecimal characters of a needle's key."""
    value_digits: Count = 6
    """Digits of a needle's number, and tokens decoded for an answer."""
    depths: tuple[float, ...] = ()
    """Depths of the targets in percent, used in turn. Empty: uniform over the haystack."""

    def __post_init__(self) -> None:
        check_fields(self)
        if any(not 0 <= depth <= 100 for depth in self.depths):
            raise ValueError(f"depths={self.depths} must be percentages from 0 to 100.")


@dataclass(frozen=True, kw_only=True)
class NeedleConfig:
    """Needle in a haystack."""

    haystack_words: tuple[int, ...] = (4000,)
    """Whitespace words of a haystack; each length is evaluated separately."""
    readings: tuple[int, ...] = (1, 2, 3, 4)
    """How often the haystack is read before the answer; each number is evaluated separately, from
    the checkpoint's memory."""
    depths: tuple[float, ...] = ()
    """Depths of the targets in percent, used in turn. Empty: uniform over the haystack."""
    samples: Count = 500
    """Haystacks per length; fewer if the text is too short."""
    seed: Natural | None = None
    """Seed of keys, numbers, depths and targets. None: the run's. Models that read the same text
    with the same seed are asked the same questions."""
    mode: Literal["paper", "reference"] = "paper"
    """paper: the last reading is written, then the question is read. reference: the question is
    read together with the haystack, before the write, as in the release."""
    write: bool = True
    """Write the readings into the memory. Off: it stays as the checkpoint has it."""
    chunk_size: Count | Literal["text", "model"] = "text"
    """Tokens per write. text: one write per reading, of all its tokens. model: the model's chunk
    size, as in training; FwMLP may need it, because one step on a whole text can diverge. LaCT
    always uses its own chunk size."""
    reset_memory_between_samples: bool = False
    """Each sample starts from the checkpoint's memory. Off, as in paper and release: the memory
    keeps what earlier samples wrote, their needles included."""
    yarn_factor: Literal["paper"] | float | None = "paper"
    """YaRN's factor for rotary positions. paper: depends on the haystack's words; none up to 4000,
    4 up to 8000, 8 up to 16,000, 16 up to 32,000, 64 beyond. None: positions as trained."""
    yarn_original_length: int = 1024
    """YaRN's original context length; the release uses 1024 although it trained on 4096."""
    piece_length: Count = 512
    """Tokens read per call; limits the device memory needed and does not change results."""

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.settings  # Checked here.
        for name in ("haystack_words", "readings"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"{name}={values} must name numbers of at least 1.")

    @property
    def settings(self) -> SampleSettings:
        """What is hidden in the haystacks that are made here."""
        return SampleSettings(depths=self.depths)

    def factor(self, words: int) -> float | None:
        """YaRN's factor for haystacks of `words` words; None: positions as trained."""
        if self.yarn_factor != "paper":
            return self.yarn_factor
        fitting = [factor for most, factor in _PAPER_FACTORS if words <= most]
        return fitting[0] if fitting else _PAPER_FACTORS[-1][1]
