"""Padding in the middle of a text that several calls read."""

import jax
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.evaluation.readers.stream_reader import StreamReader
from fwpkm_jax.models.language_model import LanguageModel
from tests.evaluation.conftest import tiny_model_config


@pytest.mark.slow
def test_a_frozen_text_in_padded_calls_reads_as_in_one_and_takes_no_room_for_padding():
    """Full attention keeps as many tokens as the text has, and none of the padding."""
    config = tiny_model_config(mixers=("attention", "gdn", "swa"), memory_layers=(1,))
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    memory = model.init_memory(jax.random.key(1), groups=1)
    text = np.random.default_rng(0).integers(0, 257, 32).astype(np.int32)
    whole = StreamReader(model, memory, write=False, piece_length=31)
    parts = StreamReader(model, memory, write=False, piece_length=16, max_length=31)
    expected = whole.read(text[:-1], text[1:]).losses()
    found = []
    for start, end in ((0, 5), (5, 12), (12, 15), (15, 31)):  # Calls of 16, 16, 4 and 16 tokens.
        reading = parts.read(text[start:end], text[start + 1 : end + 1])
        found.append(reading.losses())
        assert len(found[-1]) == end - start
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=2e-5, atol=2e-5)
    assert parts.next_token() == whole.next_token()
