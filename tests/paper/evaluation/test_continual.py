import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import optax
import pytest
from flax import nnx

from fwpkm_jax.data import TextData
from fwpkm_jax.data.packing import PackedRows
from fwpkm_jax.evaluation.readers.fast_weight_dtype import as_stored
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.paper.evaluation import continual_views as views
from fwpkm_jax.paper.evaluation.continual import CONTINUAL, ContinualConfig
from fwpkm_jax.paper.evaluation.domains import Domain, Part, read_domains
from tests.data.plain_writer import cut_rows, write_token_file
from tests.evaluation.conftest import tiny_model_config

LENGTH, BATCH = 20, 2  # Chunks of 8: two full ones and a short one.


def part(num_rows: int, seed: int) -> Part:
    tokens = np.random.default_rng(seed).integers(8, size=num_rows * (LENGTH + 1)) + 20 * seed
    rows = PackedRows([tokens.astype(np.int32)], length=LENGTH)
    return Part(rows, range(num_rows))


DOMAINS = [
    Domain("math", adapt=part(5, 1), evaluate=part(3, 2), files={}),
    Domain("law", adapt=part(4, 3), evaluate=part(4, 4), files={}),
]


@partial(jax.jit, static_argnames=("graphdef", "write"))
def whole_pass(graphdef, params, memory, tokens, *, write):
    out = nnx.merge(graphdef, params)(tokens[:, :-1], memory, write=write)
    return out.memory, optax.softmax_cross_entropy_with_integer_labels(out.logits, tokens[:, 1:])


def batches(part: Part) -> list[np.ndarray]:
    rows = np.stack([part.rows[index]["tokens"] for index in part.indices])
    return np.split(rows[: len(rows) // BATCH * BATCH], len(rows) // BATCH)


def evaluate(model, memory, *, domains=DOMAINS, **options):
    config = ContinualConfig(batch_size=BATCH, **options)
    return CONTINUAL.of_model(model, memory, config=config, domains=domains)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    config = tiny_model_config(mixers=("swa",), memory_layers=(0,))
    return LanguageModel(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def memory(model):
    return model.init_memory(jax.random.key(1))


@pytest.fixture(scope="module")
def result(model, memory):
    return evaluate(model, memory)


@pytest.fixture(scope="module")
def stages(model, memory):
    """The same protocol written out: memories after each stage and the table of losses."""
    graphdef, params = nnx.split(model)
    memories = [memory]
    for domain in DOMAINS:
        for batch in batches(domain.adapt):
            memory, _ = whole_pass(graphdef, params, memory, batch, write=True)
        memories.append(memory)
    losses = [
        [
            np.concatenate([whole_pass(graphdef, params, m, b, write=False)[1] for b in rows])
            for rows in (batches(domain.evaluate) for domain in DOMAINS)
        ]
        for m in memories
    ]
    return losses


@pytest.mark.slow
def test_every_stage_reads_a_domain_with_one_memory_and_evaluates_all_without_writing(
    result, stages
):
    expected = [[losses.mean() for losses in stage] for stage in stages]
    np.testing.assert_allclose(result.record["results"]["loss"], expected, rtol=2e-6)
    np.testing.assert_allclose(result.record["results"]["perplexity"], np.exp(expected), rtol=1e-5)
    # Reading changes much more than rounding does.
    assert np.min(np.abs(np.diff(expected, axis=0))) > 1e-4


@pytest.mark.slow
def test_incomplete_batches_are_left_out(result):
    results = result.record["results"]
    assert results["adapt_tokens"] == [4 * LENGTH, 4 * LENGTH]
    assert results["eval_tokens"] == [2 * LENGTH, 4 * LENGTH]
    assert result.record["provenance"]["scored_tokens"] == 6 * LENGTH
    assert result.arrays["loss_math"].shape == (3, 2)


@pytest.mark.slow
def test_changes_are_told_from_the_initial_memory(result, stages):
    results = result.record["results"]
    means = np.array([[losses.mean() for losses in stage] for stage in stages])
    own = np.array([means[1, 0] - means[0, 0], means[2, 1] - means[0, 1]])
    assert results["adaptation"] == pytest.approx(own.mean(), abs=1e-5)
    assert results["forgetting"] == pytest.approx((means[2, 0] - means[1, 0]) / 2, abs=1e-5)
    assert results["unseen"] == pytest.approx(means[1, 1] - means[0, 1], abs=1e-5)
    cell = results["difference"][2][0]
    assert cell["loss"] == pytest.approx(means[2, 0] - means[0, 0], abs=1e-5)
    assert cell["interval"][0] < cell["loss"] < cell["interval"][1]
    assert results["difference"][0][1] == {"loss": 0.0, "interval": [0.0, 0.0]}


@pytest.mark.slow
def test_limits_bound_both_parts(model, memory, result):
    limited = evaluate(model, memory, max_batches=1)
    assert limited.record["results"]["adapt_tokens"] == [2 * LENGTH] * 2
    assert limited.record["results"]["eval_tokens"] == [2 * LENGTH] * 2
    limited = evaluate(model, memory, max_eval_batches=1)
    np.testing.assert_array_equal(limited.arrays["loss_law"], result.arrays["loss_law"][:, :2])


@pytest.mark.slow
def test_fast_weights_may_be_rounded_after_every_batch(model, memory, result):
    rounded = CONTINUAL.of_model(
        *(model, memory),
        config=ContinualConfig(batch_size=BATCH),
        domains=DOMAINS,
        fast_weight_dtype="bfloat16",
    )
    assert rounded.record["provenance"]["fast_weight_dtype"] == "bfloat16"
    assert result.record["provenance"]["fast_weight_dtype"] == "float32"
    difference = np.abs(rounded.arrays["loss_law"] - result.arrays["loss_law"])
    assert 1e-6 < difference.max() < 0.1


def test_a_stored_memory_holds_what_bfloat16_can(memory):
    stored = jax.jit(partial(as_stored, dtype="bfloat16"))(memory)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16).astype(b.dtype)),
        stored,
        memory,
    )


def test_without_a_memory_nothing_changes():
    model = LanguageModel(tiny_model_config(memory_layers=(), mixers=("swa",)), rngs=nnx.Rngs(0))
    loss = evaluate(model, {}).record["results"]["loss"]
    assert loss[0] == loss[1] == loss[2]


def test_a_part_without_a_full_batch_is_refused_before_anything_is_read(model, memory):
    short = dataclasses.replace(ContinualConfig(), batch_size=4)
    with pytest.raises(ValueError, match="A part of math holds 3 rows, less than one batch of 4"):
        CONTINUAL.of_model(model, memory, config=short, domains=DOMAINS)


@pytest.fixture
def data(tmp_path: Path) -> TextData:
    folder = tmp_path / "math"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "' + "adapt " * 20 + '"}\n')
    (folder / "valid.txt").write_text("valid " * 20)
    rows = np.arange(5 * (LENGTH + 1), dtype=np.int32) % 100
    entries = cut_rows([rows], row_length=LENGTH + 1)
    write_token_file(tmp_path / "law.bin", entries, vocab_size=257)
    return TextData(train_paths=("unused.txt",), length=LENGTH)


def test_a_folder_gives_its_parts_and_a_file_its_halves(data, tmp_path):
    math, law = read_domains([f"sums={tmp_path / 'math'}", str(tmp_path / "law.bin")], data)
    assert (math.name, law.name) == ("sums", "law")
    assert bytes(math.adapt.rows[0]["tokens"][:6].astype(np.uint8)) == b"adapt "
    assert bytes(math.evaluate.rows[0]["tokens"][:6].astype(np.uint8)) == b"valid "
    assert len(math.adapt.indices) == len(math.evaluate.indices) == 5
    assert (law.adapt.indices, law.evaluate.indices) == (range(2), range(2, 5))
    assert law.evaluate.rows[2]["tokens"][0] == 2 * (LENGTH + 1)
    assert sorted(Path(name).name for name in math.files) == ["train.jsonl", "valid.txt"]
    assert sorted(Path(name).name for name in law.files) == ["law.bin", "law.idx"]


def test_wrong_domains_are_refused(data, tmp_path):
    folder = str(tmp_path / "math")
    with pytest.raises(ValueError, match="names no text"):
        read_domains([], data)
    with pytest.raises(ValueError, match="Two domains are called 'math'"):
        read_domains([folder, folder], data)
    (tmp_path / "math" / "train.txt").write_text("again")
    with pytest.raises(ValueError, match=r"needs one train.*has .*train.jsonl, .*train.txt"):
        read_domains([folder], data)


@pytest.mark.parametrize("field", ["batch_size", "chunk_size", "max_batches"])
def test_options_below_1_are_refused(field):
    with pytest.raises(ValueError, match=f"{field}=0"):
        ContinualConfig(**{field: 0})


@pytest.mark.slow
def test_table_and_picture_show_every_stage_and_domain(result, tmp_path):
    table = views.table(result.record)
    perplexity = result.record["results"]["perplexity"]
    for name, row in zip(("initial memory", "after math", "after law"), perplexity, strict=True):
        assert f"{name:14}  {row[0]:.4f}" in table
        assert f"{row[1]:.4f}" in table
    (path,) = views.plot(result.record, tmp_path)
    image = matplotlib.image.imread(path)[..., :3]
    assert np.mean(np.any(image < 0.9, axis=-1)) > 0.01
