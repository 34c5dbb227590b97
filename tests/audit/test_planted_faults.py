"""Each planted fault fails its line of the audit, and the line names the fault."""

from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.audit import apart, causality, forgotten, reads_the_token_before
from fwpkm_jax.audit.indices import scores_of
from fwpkm_jax.audit.model_paths import _cause
from fwpkm_jax.audit.paths import ModelProgram, for_rows, probe, whole_pass
from fwpkm_jax.audit.program import Way, in_pieces
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


def line_of(subject):
    """The line of whole passes over 20 tokens in chunks of 8."""
    program = ModelProgram(subject.model, subject.memory)
    way = Way(
        lambda one: (
            lambda tokens: whole_pass(
                one.model, for_rows(one.initial, len(tokens)), write=one.writes
            )(tokens)
        )
    )
    tokens = np.random.default_rng(0).integers(VOCAB, size=(3, 20)).astype(np.int32)
    cause = _cause(way, program, tokens)
    options = {"vocab_size": VOCAB, "rows_apart": True, "cause": cause}
    return causality("whole pass", way.path(program), tokens, [7, 8, 12], **options)


@pytest.mark.thorough
def test_a_sound_model_passes_bit_for_bit(subject):
    line = line_of(subject)
    assert line.verdict == "pass"
    assert line.text == (
        "Another text from each of 3 of 19 positions, each in one of 3 rows (a look over up to 7 "
        "tokens could hide) on moves nothing before it, bit for bit."
    )
    assert line.numbers["back"] == [0, 0, 0]


@pytest.mark.slow
def test_attention_that_sees_one_token_ahead_is_named():
    subject = make_subject()
    ahead(subject.model.blocks[0].mixer)
    line = line_of(subject)
    assert line.verdict == "fail"
    assert line.numbers["back"] == [1, 1, 1]
    assert "from token 7 on moves logits 1 token before it" in line.text
    assert line.text.endswith("without any memory layer: attention or another mixer sees ahead.")


@pytest.mark.slow
def test_a_memory_that_sees_one_token_ahead_is_named():
    subject = make_subject()
    ahead(subject.model.blocks[0].memory)
    line = line_of(subject)
    assert line.verdict == "fail"
    assert line.numbers["back"] == [1, 1, 1]
    assert line.text.endswith("with writing disabled: the memory's read sees ahead.")


@pytest.mark.slow
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
    assert line.text.endswith("moves no logits: it is not read.")


SHIFTS = {0: "pass", 1: "fail", -1: "fail"}


@pytest.mark.thorough("1", "-1")
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


@pytest.mark.thorough("validation loss")
@pytest.mark.parametrize(
    "name", ["training loss", "validation loss", "evaluation loss", "validation accuracy", "recall"]
)
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
def test_a_recall_that_sees_its_answers_is_named(subject):
    """An echo is right whatever stands there."""
    logits = whole_pass(subject.model, subject.memory)
    tokens = np.random.default_rng(0).integers(VOCAB, size=7).astype(np.int32)
    options = {"vocab_size": VOCAB, "counts_right": True}
    line = reads_the_token_before("recall", lambda *_: 1.0, logits, tokens, 4, **options)
    assert line.verdict == "fail"
    assert line.numbers["sum"] == VOCAB


@pytest.mark.slow
def test_a_memory_that_two_users_share_is_named(subject):
    tokens = np.random.default_rng(3).integers(VOCAB, size=(2, 18)).astype(np.int32)

    class Shared(ModelProgram):
        """One memory of all rows."""

        def start(self, rows, length):
            return self.model.init_stream(for_rows(self.initial, 1), batch=rows, max_length=length)

        def memory(self, state):
            return {}

    own, shared = (
        apart("users", in_pieces(kind(subject.model, subject.memory), piece=18), tokens,
              vocab_size=VOCAB)
        for kind in (ModelProgram, Shared)
    )  # fmt: skip
    assert own.verdict == "pass", own.text
    assert shared.verdict == "fail"
    assert "users share a memory" in shared.text


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


def test_a_text_is_as_long_as_the_runs_rows_and_has_several_writes(subject):
    texts = probe(subject.model, subject.memory, seed=0)
    assert texts.tokens.shape == (32, 103)
    assert texts.changed == list(range(1, 103))
    assert probe(subject.model, subject.memory, seed=0, row_length=256).tokens.shape[1] == 263
    larger = replace(subject.model.config.fast_weight, chunk_size=64)
    model = make_subject(fast_weight=larger).model
    assert probe(model, subject.memory, seed=0).tokens.shape[1] == 291
    large = {"layer_0": np.zeros((1, 2**27), np.float32)}
    assert len(probe(model, large, seed=0).tokens) == 2
