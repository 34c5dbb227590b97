"""Each planted fault fails its line of the audit, and the line names the fault."""

from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.audit import apart, causality, forgotten, reads_the_token_before
from fwpkm_jax.audit.indices import nothing_to_find, scores_of
from fwpkm_jax.audit.isolation import _streams
from fwpkm_jax.audit.model_paths import _cause
from fwpkm_jax.audit.paths import for_rows, probe, whole_pass
from fwpkm_jax.data import RecallData
from fwpkm_jax.evaluation import recall
from fwpkm_jax.rules import FwPKM
from fwpkm_jax.rules.base import AbstractChunkRule
from tests.audit.conftest import make_subject

VOCAB = 24


@dataclass(frozen=True, kw_only=True)
class ReadsItsOwnWrite(FwPKM):
    """FwPKM, but each chunk is read after it was written."""

    def step(self, memory, chunk):
        sound = FwPKM(**{field.name: getattr(self, field.name) for field in fields(FwPKM)})
        written = sound.step(memory, chunk)
        return written._replace(output=sound.step(written.memory, chunk).output)

    run = AbstractChunkRule.run  # Chunk by chunk, by `step`.
    run_groups = AbstractChunkRule.run_groups


def ahead(layer):
    """The layer, whose inputs are those of the next token."""
    kind = type(layer)

    def call(self, x, *args, **options):
        return kind.__call__(self, jnp.roll(x, -1, axis=1), *args, **options)

    layer.__class__ = type(f"Ahead{kind.__name__}", (kind,), {"__call__": call})


def line_of(subject, *, write=True):
    """The line of whole passes over 20 tokens in chunks of 8."""

    def variant(model, memory, write):
        return lambda tokens: whole_pass(model, for_rows(memory, len(tokens)), write=write)(tokens)

    tokens = np.random.default_rng(0).integers(VOCAB, size=(3, 20)).astype(np.int32)
    return causality(
        "whole pass",
        variant(subject.model, subject.memory, write),
        tokens,
        [7, 8, 12],
        vocab_size=VOCAB,
        rows_apart=True,
        cause=_cause(variant, subject.model, subject.memory, tokens),
    )


def test_a_sound_model_passes_bit_for_bit(subject):
    line = line_of(subject)
    assert line.verdict == "pass"
    assert line.text == "3 changes moved nothing before them, bit for bit."
    assert line.numbers["back"] == [0, 0, 0]


def test_attention_that_sees_one_token_ahead_is_named():
    subject = make_subject()
    ahead(subject.model.blocks[0].mixer)
    line = line_of(subject)
    assert line.verdict == "fail"
    assert line.numbers["back"] == [1, 1, 1]
    assert "moves logits 1 token before it" in line.text
    assert line.text.endswith("without any memory layer: attention or another mixer sees ahead.")


def test_a_memory_that_sees_one_token_ahead_is_named():
    subject = make_subject()
    ahead(subject.model.blocks[0].memory)
    line = line_of(subject)
    assert line.verdict == "fail"
    assert line.numbers["back"] == [1, 1, 1]
    assert line.text.endswith("with writing disabled: the memory's read sees ahead.")


@pytest.mark.thorough
def test_a_chunk_that_reads_its_own_write_is_named():
    rule = ReadsItsOwnWrite(num_subkeys=4, key_dim=8, value_dim=8, top_k=2)
    line = line_of(make_subject(rule=rule))
    assert line.verdict == "fail"
    # Within its chunk only: token 8 is the first of the second one.
    assert line.numbers["back"][0] > 1
    assert line.numbers["back"][1] == 0
    assert line.text.endswith("only while writing: a chunk reads its own write, or a later one.")


def test_a_cache_that_was_filled_with_the_whole_text_is_caught():
    """As in a published claim of recall that was withdrawn."""
    kept = {}

    def path(tokens):
        kept["sum"] = tokens.sum(axis=1)  # Of the whole text, before its first token is read.
        one_hot = jax.nn.one_hot(tokens, VOCAB)
        return np.asarray(one_hot + kept["sum"][:, None, None])

    tokens = np.zeros((1, 6), np.int32)
    line = causality("cache", path, tokens, [3], vocab_size=VOCAB)
    assert line.verdict == "fail"
    assert line.numbers["back"] == [3]


def test_a_path_that_reads_nothing_cannot_pass():
    def path(tokens):
        return np.zeros((*tokens.shape, VOCAB), np.float32)

    line = causality("constant", path, np.zeros((1, 6), np.int32), [3], vocab_size=VOCAB)
    assert line.verdict == "fail"
    assert line.text.endswith("moves no logits at all: it is not read.")


def test_rounding_of_a_device_that_adds_in_no_order_is_measured_and_allowed():
    rng = np.random.default_rng(0)

    def path(tokens):
        noise = rng.uniform(0.9e-6, 1e-6) * rng.choice([-1, 1])
        return (np.eye(VOCAB, dtype=np.float32)[tokens] + np.float32(noise)).astype(np.float32)

    line = causality(
        "noisy", path, np.zeros((1, 6), np.int32), [3], vocab_size=VOCAB, rounding=1e-5
    )
    assert line.verdict == "pass"
    assert "within 1e-05" in line.text


SHIFTS = {0: "pass", 1: "fail", -1: "fail"}


@pytest.mark.parametrize("shift", SHIFTS)
def test_labels_shifted_by_one_are_named(subject, shift):
    logits = whole_pass(subject.model, subject.memory)

    def score(tokens, position):
        row = logits(tokens[None])[0, position - 1 + shift]
        return float(jax.nn.softmax(row)[tokens[position]])

    tokens = np.random.default_rng(0).integers(VOCAB, size=7).astype(np.int32)
    line = reads_the_token_before("loss", score, logits, tokens, 4, vocab_size=VOCAB)
    assert line.verdict == SHIFTS[shift]
    if shift == 1:
        assert abs(line.numbers["sum"] - 1) > 0.01
        assert line.text.endswith("at its own position: labels are shifted by one.")
    if shift == -1:
        assert "leaves out the newest: labels are shifted by one" in line.text


@pytest.mark.parametrize(
    "name", ["training loss", "validation loss", "evaluation loss", "validation accuracy", "recall"]
)
@pytest.mark.by_default("training loss")
def test_the_projects_own_scores_read_the_token_before(subject, name):
    score, counts_right = scores_of(subject)[name]
    tokens = np.random.default_rng(0).integers(VOCAB, size=7).astype(np.int32)
    line = reads_the_token_before(
        name,
        score,
        whole_pass(subject.model, subject.memory),
        tokens,
        4,
        vocab_size=VOCAB,
        counts_right=counts_right,
    )
    assert line.verdict == "pass", line.text
    assert line.numbers["sum"] == pytest.approx(1, abs=1e-3)


@pytest.mark.thorough
def test_a_recall_that_sees_its_answers_is_caught_where_nothing_is_stated(subject, monkeypatch):
    data = RecallData(
        length=24, num_facts=2, num_keys=4, num_values=8, num_filler=12, min_distance=8
    )
    subject = replace(subject, data=data, batch_size=8)
    assert nothing_to_find(subject).verdict == "pass"

    def shifted(graphdef, params, memory, tokens, *, write, partition):
        right = jnp.ones_like(tokens[:, 1:], bool)  # An echo, read at the label's own position.
        return right, right, memory

    monkeypatch.setattr(recall, "_answer", shifted)
    line = nothing_to_find(subject)
    assert line.verdict == "fail"
    assert line.text.endswith("the accuracy sees the answer that it scores.")


def texts(length: int = 18):
    return np.random.default_rng(3).integers(VOCAB, size=(3, length)).astype(np.int32)


@pytest.mark.thorough
def test_a_memory_that_two_users_share_is_named(subject):
    mine, theirs, other = texts()
    rows = np.stack([mine, theirs])
    users = _streams(subject.model, for_rows(subject.memory, 2), rows)
    own = apart("users", users, mine, theirs, other)
    assert own.verdict == "pass", own.text
    both = _streams(subject.model, for_rows(subject.memory, 1), rows)  # One memory of two.

    def without_memory(mine, theirs):
        return {name: x for name, x in both(mine, theirs).items() if name != "memory"}

    shared = apart("users", without_memory, mine, theirs, other)
    assert shared.verdict == "fail"
    assert "the users share a memory" in shared.text


def test_a_check_of_users_that_sees_nothing_cannot_pass():
    line = apart("users", lambda mine, theirs: np.zeros(3), *texts())
    assert line.verdict == "fail"
    assert line.text.endswith("so it cannot fail.")


def test_a_reset_that_is_none_is_named():
    start, read, kept = np.zeros(4), np.ones(4), np.array([0.0, 0.0, 0.0, 1.0])
    assert forgotten("reset", start, start, read, what="a reset").verdict == "pass"
    line = forgotten("reset", {"queue": kept}, {"queue": start}, {"queue": read}, what="a reset")
    assert line.verdict == "fail"
    assert line.text == (
        "After a reset, queue still differs by 1 from one that never read more: it is no reset."
    )
    blind = forgotten("reset", start, start, start, what="a reset")
    assert blind.verdict == "fail"


def test_a_text_has_several_writes_and_a_part_of_a_chunk(subject):
    texts = probe(subject.model, subject.memory, seed=0)
    assert texts.tokens.shape == (len(texts.changed), 35)
    assert {1, 4, 7, 8, 9, 15, 16, 17, 34} <= set(texts.changed)
    larger = replace(subject.model.config.fast_weight, chunk_size=64)
    model = make_subject(fast_weight=larger).model
    assert probe(model, subject.memory, seed=0).tokens.shape[1] == 175
