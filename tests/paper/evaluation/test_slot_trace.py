import array
import re

import numpy as np
import pytest

from fwpkm_jax.data import TextData, load_tokenizer
from fwpkm_jax.evaluation import Subject
from fwpkm_jax.evaluation.needle.samples import take_samples
from fwpkm_jax.evaluation.readers.slot_log import Entry, SlotLog
from fwpkm_jax.evaluation.readers.stream_reader import StreamReader
from fwpkm_jax.evaluation.readers.tracing_reader import SlotRead, TracingReader
from fwpkm_jax.paper.evaluation import trace_views as views
from fwpkm_jax.paper.evaluation.trace import TRACE, TraceConfig, describe_slot

BYTES = load_tokenizer("bytes")
TEXT = " ".join(f"<w{i}>" for i in range(40))
CONFIG = TraceConfig(haystack_words=10, samples=3, readings=2)


def test_a_slot_keeps_its_latest_writer_and_its_surroundings():
    log, text = SlotLog(5), array.array("i", range(100, 130))
    log.add(np.array([[0, 1], [1, 2], [1, 0]]), np.array([[1, 2], [3, 4], [5, 6.0]]),
            first_position=12, write=0)  # fmt: skip
    log.add(np.array([[2, 3]]), np.array([[7, 8.0]]), first_position=20, write=1)
    entry = {slot: log.entry(slot, text, lookahead=1, num_writes=2) for slot in range(5)}
    assert entry[4] is None
    assert entry[1] == entry[0]._replace(score=5.0, writers=3)
    assert (entry[0].query, entry[0].target, entry[0].score) == (114, 115, 6.0)
    assert (entry[0].age, entry[0].writers, entry[0].position) == (1, 2, 14)
    assert entry[0].before == list(range(105, 115))
    assert entry[0].after == list(range(116, 125))
    assert (entry[2].query, entry[2].age, entry[2].writers) == (120, 0, 1)
    assert entry[3].score == 8.0


def test_a_hit_is_a_slot_that_holds_the_right_next_token():
    entry = Entry(97, 115, [97], [100, 10], 0.5, age=1, position=7, writers=2)
    for expected, hit in (("s", True), ("a", False), ("d", False)):
        described = describe_slot(SlotRead(3, 0.25, entry), ord(expected), BYTES)
        assert described["hit"] is hit
        assert described["slot"] == 3
        assert described["entry"]["target"] == "s"
        assert (described["entry"]["before"], described["entry"]["after"]) == (["a"], ["d", "\n"])
    empty = describe_slot(SlotRead(3, 0.25, None), ord("s"), BYTES)
    assert (empty["hit"], empty["entry"]) == (False, None)


@pytest.mark.slow
def test_the_log_names_the_slots_that_a_write_changes(model, memory):
    """And an answer's slots are those that the stream reads."""
    tokens = BYTES.encode("The log knows who wrote what, token by token: 22.")
    options = {"capacity": 64, "max_length": 64, "piece_length": 4, "chunk_size": "flush"}
    reader = TracingReader(
        StreamReader(model, memory, write=True, **options), model.config.fast_weight.rule
    )
    before = np.asarray(memory["layer_1"].values[0])
    for write in range(2):
        reader.restart()
        reader.read(tokens)
        reader.write()
        after = np.asarray(reader._reader.stream.memory["layer_1"].values[0])
        log = reader.logs["layer_1"]
        touched = np.flatnonzero(log.write == write)
        np.testing.assert_array_equal(np.flatnonzero(np.any(after != before, axis=1)), touched)
        before = after
    # The last token waits for its target; of the first reading it was written with the second.
    assert np.max(log.position) == 2 * len(tokens) - 2
    np.testing.assert_array_equal(reader.tokens, np.tile(tokens, 2))
    reader.read(tokens[:5])
    chosen = reader.next_token()
    (read,) = (reads["layer_1"] for reads in reader.reads)
    plain = StreamReader(model, memory, write=True, **options)
    for _ in range(2):
        plain.restart()
        plain.read(tokens)
        plain.write()
    plain.read(tokens[:5])
    assert chosen == plain.next_token()
    gates, access = plain.last_read()
    expected = access["layer_1"]
    assert read.gate == pytest.approx(float(gates["layer_1"]), abs=1e-6)
    order = np.argsort(-expected.slot_weights)
    assert [slot.slot for slot in read.slots] == list(expected.slot_ids[order])
    np.testing.assert_allclose(
        [slot.weight for slot in read.slots], expected.slot_weights[order], rtol=1e-5
    )


@pytest.fixture
def second_is_right(monkeypatch):
    """Answers of a model that is told them: the second is right."""
    samples = take_samples([("book", TEXT)], CONFIG.needles, words=10, seed=0)
    told = iter("ab" + samples[0].answer[2:] + samples[1].answer)
    decide = StreamReader.next_token

    def next_token(reader):
        decide(reader)
        return ord(next(told))

    monkeypatch.setattr(StreamReader, "next_token", next_token)
    return samples[1]


@pytest.mark.slow
def test_the_first_right_answer_is_shown_with_its_hits(model, memory, second_is_right, tmp_path):
    result = TRACE.of_model(
        model, memory, config=CONFIG, texts=lambda: [("book", TEXT)], tokenizer=BYTES
    )
    results = result.record["results"]
    assert results["exact"]
    assert results["tried"] == 2
    assert results["answer"] == second_is_right.answer == results["sample"]["answer"]
    assert results["sample"]["needle"] in second_is_right.haystack
    assert len(results["tokens"]) == 6
    for token, digit in zip(results["tokens"], second_is_right.answer, strict=True):
        assert token["expected"] == token["generated"] == digit
        (read,) = token["layers"].values()
        weights = [slot["weight"] for slot in read["slots"]]
        assert weights == sorted(weights, reverse=True)
        assert sum(weights) == pytest.approx(1, abs=1e-5)
        for slot in read["slots"]:
            assert slot["hit"] == (slot["entry"] is not None and slot["entry"]["target"] == digit)
            if slot["entry"]:
                before = "".join(slot["entry"]["before"])
                assert before.endswith(slot["entry"]["query"])
                assert result.arrays["layer_1_target"][slot["slot"]] >= 0
        hits = [slot["weight"] for slot in read["slots"] if slot["hit"]]
        assert read["hit_weight"] == pytest.approx(sum(hits), abs=1e-6)
    reads = [token["layers"]["layer_1"]["slots"] for token in results["tokens"]]
    # Whether this model hits by chance or not, a hit is marked.
    hit = next(slot for slots in reads for slot in slots if slot["entry"])
    hit["hit"] = True
    (path,) = views.plot(result.record, tmp_path)
    markup = path.read_text(encoding="utf-8")
    assert markup.count('<tr class="hit">') == sum(s["hit"] for slots in reads for s in slots)
    assert re.search(r"<w\d", markup) is None
    assert "&lt;w" in markup
    assert "is right, the first right one after 2 samples" in markup
    assert "is right" in views.table(result.record)


@pytest.mark.slow
def test_without_a_right_answer_the_best_is_shown(model, memory, tmp_path, caplog):
    (tmp_path / "book.txt").write_text(TEXT)
    data = TextData(train_paths=("none",), valid_paths=(str(tmp_path),))
    subject = Subject(
        model=model, memory=memory, data=data, lifetime="carried", groups=1, batch_size=1
    )
    assert TRACE.missing(subject, CONFIG) is None
    result = TRACE.run(subject, CONFIG)
    results = result.record["results"]
    assert not results["exact"]
    assert results["tried"] == 3
    (path,) = views.plot(result.record, tmp_path)
    assert "None of 3 samples was answered correctly" in path.read_text(encoding="utf-8")
    assert result.record["provenance"]["scored_tokens"] == 18
    assert "No answer to 3 samples was right; the best has" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"readings": 0}, r"readings=\(0,\) must name numbers of at least 1"),
        ({"samples": 0}, "samples=0 is too small; use 1"),
    ],
)
def test_options_that_make_no_trace_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TraceConfig(**options)
