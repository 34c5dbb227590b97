"""The validation loss against the same loss written out."""

import jax
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.training.micro_batches import broadcast_memory
from fwpkm_jax.training.state import MemoryConfig
from fwpkm_jax.training.validation import make_validation
from tests.training.tiny_config import get_config

MODEL = get_config().model
BATCH, LENGTH = 4, 16
MEMORY = MemoryConfig(groups=4, lifetime="batch")


def sample_batch(seed, *, answers):
    rng = np.random.default_rng(seed)
    batch = {
        "tokens": rng.integers(0, MODEL.vocab_size, (BATCH, LENGTH + 1), dtype=np.int32),
        "loss_weight": rng.uniform(0, 2, (BATCH, LENGTH)).astype(np.float32),
    }
    if answers:
        asked = rng.uniform(size=(BATCH, LENGTH)) < 0.5
        batch["answer_distance"] = np.where(asked, 7, 0).astype(np.int32)
    return batch


@pytest.mark.thorough("1-False")
@pytest.mark.parametrize(("micro_batches", "answers"), [(1, False), (2, True)])
def test_the_loss_is_the_mean_weighted_over_all_batches(micro_batches, answers):
    model = LanguageModel(MODEL, rngs=nnx.Rngs(0))
    memory = model.init_memory(jax.random.key(1))
    batches = [sample_batch(seed, answers=answers) for seed in range(2)]
    batches[1]["loss_weight"][1:] = 0  # Batches of unequal weight.
    validate = make_validation(batches, memory=MEMORY, micro_batches=micro_batches)
    values = validate(model, memory)

    read = jax.jit(lambda tokens: model(tokens, broadcast_memory(memory, BATCH)).logits)
    loss = weight = right = asked = 0.0
    for batch in batches:
        logits, labels = read(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]
        chosen = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), labels[..., None], -1)
        loss -= np.sum(chosen[..., 0] * batch["loss_weight"])
        weight += np.sum(batch["loss_weight"])
        if answers:
            is_answer = batch["answer_distance"] > 0
            right += np.sum((np.argmax(logits, axis=-1) == labels) & is_answer)
            asked += np.sum(is_answer)
    assert values["loss"] == pytest.approx(loss / weight, rel=1e-5)
    assert values.get("answer_accuracy") == (pytest.approx(right / asked) if answers else None)


def test_validation_without_batches_is_refused():
    with pytest.raises(ValueError, match="no batch to validate on"):
        make_validation([], memory=MEMORY)
