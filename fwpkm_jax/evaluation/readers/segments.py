"""How a document is cut into segments, and a segment into pieces of few sizes."""

from typing import Literal, NamedTuple

Segmentation = Literal["overlap", "reference"]


class Segment(NamedTuple):
    """A part of a document: inputs from `start` up to `start + length`; labels one token later."""

    start: int
    length: int


def split_into_segments(
    num_tokens: int, *, segment_length: int, segmentation: Segmentation = "overlap"
) -> list[Segment]:
    """The segments of a document, in order; an empty list for fewer than two tokens.

    Args:
      num_tokens: length of the document, its last token included.
      segmentation: "overlap" steps by `segment_length` and shares one token between neighbours, so
        every token but the first is a label once. "reference" follows the authors' release, whose
        starts and ends drift apart: segment k starts at `(segment_length + 1) * k` but ends where
        "overlap" ends it. It is therefore k inputs shorter, k tokens are skipped after it, and the
        first token of a later segment is never a label.

    Raises:
      ValueError: `segment_length` is below 1.
    """
    if segment_length < 1:
        raise ValueError(f"segment_length={segment_length} must be at least 1.")
    step = segment_length + (segmentation == "reference")
    segments = []
    for k, start in enumerate(range(0, num_tokens, step)):
        last = min(segment_length * (k + 1), num_tokens - 1)  # Position of the last label.
        if last > start:
            segments.append(Segment(start, last - start))
    return segments


def piece_sizes(segment_length: int, *, devices: int = 1) -> tuple[int, ...]:
    """The lengths of the pieces that segments are read in, longest first.

    These are the segment length and the powers of 4 below it, each times `devices`, where the
    segment length is rounded up. Any shorter segment then takes at most three pieces of each size,
    and only these few sizes are compiled.

    Args:
      devices: share each piece, whose length is a multiple of their number.
    """
    whole = -(-segment_length // devices)
    powers = []
    size = 1
    while size < whole:
        powers.append(size * devices)
        size *= 4
    return (whole * devices, *reversed(powers))


def cut_into_pieces(length: int, sizes: tuple[int, ...]) -> list[int]:
    """Sizes that add up to `length`, or to a little more than it, largest first.

    Args:
      sizes: allowed sizes, longest first (`piece_sizes`); the sum is less than the last size more
        than `length`.
    """
    pieces = []
    for size in sizes:
        count, length = divmod(length, size)
        pieces += [size] * count
    return pieces + [sizes[-1]] * (length > 0)


def pad_into_pieces(length: int, sizes: tuple[int, ...]) -> list[int]:
    """The largest size as often as it fits, then the smallest one that holds the rest."""
    count, rest = divmod(length, sizes[0])
    return [sizes[0]] * count + [min(size for size in sizes if size >= rest)] * (rest > 0)


def pairs_left_by_the_reference(length: int, *, chunk_size: int, lookahead: int) -> bool:
    """Whether the release writes once more at the end of a segment that began with an empty queue.

    The release's queue writes at the end of a call if `chunk_size` tokens wait. Ours writes once
    `lookahead` more tokens wait. The two differ if a segment ends on a multiple of the chunk size.
    """
    writes = max(0, (length - lookahead) // chunk_size)
    return length - writes * chunk_size >= chunk_size
