"""A stream that starts again at position 0: what it keeps and what it must not."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayerConfig
from fwpkm_jax.models.language_model import LanguageModel
from tests.models.test_language_model import CONFIG

MODEL = replace(
    CONFIG,
    mixers=("swa",),
    memory_layers=(),
    pkm_layers=(),
    fast_weight_layer=FastWeightLayerConfig(hidden_dim=6, chunk_size=4, initial_rate=0.1),
)


@pytest.mark.thorough("False")
@pytest.mark.parametrize("pending", [False, True])
def test_a_new_document_does_not_label_the_last_token_of_the_one_before(pending):
    """Steps on two documents equal the sum of the steps on each: no pair spans both documents."""
    model = LanguageModel(MODEL, rngs=nnx.Rngs(0))
    documents = np.random.default_rng(0).integers(0, MODEL.vocab_size, (2, 1, 7)).astype(np.int32)
    start = model.init_stream({}, batch=1, max_length=8)

    @jax.jit
    def read(tokens, stream):
        return model.stream(tokens, stream).stream

    alone = [read(document, start).head.sums for document in documents]
    first = read(documents[0], start)
    both = read(documents[1], model.reset_caches(first, pending=pending)).head.sums
    expected = jax.tree.map(np.add, *alone)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), both, expected
    )
    sizes = [np.max(np.abs(leaf)) for leaf in jax.tree.leaves(expected)]
    assert max(sizes) > 1e-2
