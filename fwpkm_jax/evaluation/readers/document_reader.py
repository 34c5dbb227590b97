"""Documents as one stream of segments: what is reset, dropped and written between them."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from fwpkm_jax.evaluation.readers.segments import pairs_left_by_the_reference, split_into_segments
from fwpkm_jax.evaluation.readers.stream_reader import Reading, StreamReader


def read_document(
    reader: StreamReader,
    tokens: np.ndarray,
    *,
    segment_length: int,
    protocol: Literal["default", "release"] = "default",
    memory_reset: Literal["never", "document"] = "never",
) -> Iterator[Reading]:
    """Reads one document and yields its segments' readings in order.

    Args:
      reader: whose memory is written as chunks fill.
      tokens: token ids `[length]` of the whole document.
      segment_length: inputs of a full segment; attention and GDN start empty in each.
      protocol: see `PerplexityConfig`.
      memory_reset: "document" starts from the reader's first memory.
    """
    if memory_reset == "document":
        reader.reset_memory()
    assert isinstance(reader.chunk_size, int), "documents are written in chunks"
    released = protocol == "release"
    for start, length in split_into_segments(
        len(tokens),
        segment_length=segment_length,
        segmentation="reference" if released else "overlap",
    ):
        reader.restart()
        end = start + length
        # Rounded once for each segment, as the release does for each of its calls.
        yield reader.read(tokens[start:end], tokens[start + 1 : end + 1], round_memory=False)
        if released:
            # At the end of a segment the release writes the pairs that our queue would write with
            # the next token, and drops the rest.
            if pairs_left_by_the_reference(
                length, chunk_size=reader.chunk_size, lookahead=reader.lookahead
            ):
                reader.write()
            reader.restart(drop_queue=True)
        reader.round_memory()
    if not released:
        reader.write()
        reader.restart(drop_queue=True)
