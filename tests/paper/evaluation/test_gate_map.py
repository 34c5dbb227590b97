import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.data import TextData, load_tokenizer
from fwpkm_jax.evaluation import Subject
from fwpkm_jax.paper.evaluation import gate_map_views as views
from fwpkm_jax.paper.evaluation.gate_map import GATE_MAP, GateMapConfig
from fwpkm_jax.paper.evaluation.token_texts import END, token_texts

BYTES = load_tokenizer("bytes")
TEXT = "A <b>bold</b> caf\u00e9.\nSecond line & more of it, long enough for writes."
CONFIG = GateMapConfig(tokens=40, chunk_size=8)


@pytest.fixture(scope="module")
def record(model, memory):
    return GATE_MAP.of_model(
        model,
        memory,
        config=CONFIG,
        document_id="book <1>",
        tokens=BYTES.encode(TEXT),
        tokenizer=BYTES,
    ).record


@pytest.mark.slow
def test_gates_are_those_of_the_stream_at_the_evaluations_chunk_size(model, memory, record):
    graphdef, params = nnx.split(model)
    stream = model.init_stream(memory, batch=1, max_length=40)
    out = jax.jit(lambda params, tokens, stream: nnx.merge(graphdef, params).stream(
        tokens, stream, chunk_size=8
    ))(params, BYTES.encode(TEXT)[None, :40], stream)  # fmt: skip
    results = record["results"]
    assert list(results["gates"]) == ["layer_1"]
    np.testing.assert_allclose(results["gates"]["layer_1"], out.info["layer_1"].gate[0], atol=1e-4)
    assert record["provenance"]["chunk_size"] == 8
    assert record["provenance"]["scored_tokens"] == 40
    assert "".join(results["texts"]) == TEXT.encode()[:40].decode()


@pytest.mark.slow
def test_the_page_shows_every_token_in_the_shade_of_its_gate(record, tmp_path):
    (path,) = views.plot(record, tmp_path)
    markup = path.read_text(encoding="utf-8")
    spans = re.findall(r'<span class="g(\d+)" title="gate ([\d.]+), [^"]*">([^<]*)</span>', markup)
    gates = record["results"]["gates"]["layer_1"]
    assert [float(gate) for _, gate, _ in spans] == [pytest.approx(g, abs=1e-3) for g in gates]
    shades = [int(shade) for shade, _, _ in spans]
    assert {0, 20} <= set(shades) <= set(range(21))
    order = np.argsort(gates)
    assert np.all(np.diff(np.array(shades)[order]) >= 0)  # Darker is higher.
    low, high = np.quantile(gates, (0.01, 0.99))
    middle = int(np.argmin(np.abs(np.array(gates) - (low + high) / 2)))
    assert abs(shades[middle] - 20 * (gates[middle] - low) / (high - low)) <= 0.5
    assert f"gate {low:.2f} or less" in markup
    shown = "".join(text for _, _, text in spans)
    assert shown.startswith("A &lt;b&gt;bold&lt;/b&gt; caf\u00b7\u00e9.\u23ce")
    assert "book &lt;1&gt;" in markup
    assert "layer_1" in views.table(record)


@pytest.mark.slow
def test_a_text_is_not_shaded_where_the_gate_does_not_change_the_output(record, tmp_path):
    unused = {**record, "results": record["results"] | {"gate_mixes": False}}
    (path,) = views.plot(unused, tmp_path)
    markup = path.read_text(encoding="utf-8")
    assert set(re.findall(r'<span class="g(\d+)"', markup)) == {"0"}  # White.
    assert "not shaded" in markup
    assert 'class="key"' not in markup
    assert "Dark tokens" not in markup


@pytest.mark.slow
def test_a_document_is_chosen_by_number(model, memory, record, tmp_path):
    for name, text in (("a", "Not this one."), ("b", TEXT)):
        (tmp_path / f"{name}.txt").write_text(text)
    data = TextData(train_paths=("none",), valid_paths=(str(tmp_path),))
    subject = Subject(
        model=model, memory=memory, data=data, lifetime="carried", groups=1, batch_size=1
    )
    result = GATE_MAP.run(subject, replace(CONFIG, document=1))
    assert result.record["results"] == record["results"] | {"document": "b.txt"}
    assert list(result.record["provenance"]["data_files"]) == [
        str(tmp_path / name) for name in ("a.txt", "b.txt")
    ]
    with pytest.raises(ValueError, match="document=2 is beyond the last document"):
        GATE_MAP.run(subject, replace(CONFIG, document=2))
    assert GATE_MAP.missing(subject, CONFIG) is None
    without = replace(subject, data=replace(data, valid_paths=()))
    assert "a text" in GATE_MAP.missing(without, CONFIG)


def test_what_has_no_gates_or_no_text_is_refused(model, memory):
    with pytest.raises(ValueError, match="book has 1 tokens"):
        GATE_MAP.of_model(
            model,
            memory,
            config=CONFIG,
            document_id="book",
            tokens=np.array([1], np.int32),
            tokenizer=BYTES,
        )
    with pytest.raises(ValueError, match="chunk_size=0 is too small; use 1"):
        GateMapConfig(chunk_size=0)


@pytest.mark.parametrize("name", ["bytes", "mistral-v1"])
def test_what_tokens_add_makes_up_the_text(name):
    tokenizer = load_tokenizer(name)
    text = "Caf\u00e9 na\u00efve \u4f60\u597d  two  spaces 123\n\U0001f600 end"
    ids = [*tokenizer.encode(text), tokenizer.eos_id]
    texts = token_texts(tokenizer, ids)
    assert "".join(texts) == text + END
    assert len(texts) == len(ids)
