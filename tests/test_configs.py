"""Every config file: it loads, its model has the right size, and its parts train when shrunk."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.paper.cost import model_cost
from benchmarks.paper.published import PUBLISHED
from fwpkm_jax.config import Experiment, from_json, load_config, shipped_configs
from fwpkm_jax.data import RecallData, TextData, stream_documents, vocab_size
from fwpkm_jax.paper.models import PSWA, TABLE_1
from fwpkm_jax.rules import SDM, FwPKM
from fwpkm_jax.run.train import train
from fwpkm_jax.training.random_window import random_window

CONFIGS = shipped_configs()
# Configs share their parts; the first few train each part once.
TRAINED = (
    "recall",
    "gdn_swa__pkm6_fwpkm2_10",
    "fa__fwmlp2_6_10",
    "lact",
    "matrix_memory",
    "sdm",
    "sdm_heads",
    "titans",
)
TRAINED_SLOWLY = ("recall_without_memory", "recall_carried", "books_tiny", "fast_weight_layer")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_is_valid_and_comes_back_from_json(name):
    experiment = load_config(name)
    assert from_json(json.loads(json.dumps(experiment.to_json()))) == experiment
    assert experiment.run_dir == f"runs/{name}"


@pytest.mark.by_default(
    "gdn_swa", "lact", "recall", thorough=["ablations/dot_scores", "fa__fwpkm2_6_10__pswa"]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_attention_of_every_model_can_be_limited_as_its_config_says(name):
    experiment = load_config(name)
    random_window(experiment.model, experiment.training.window_probability)


@pytest.mark.by_default(
    "gdn_fa__fwpkm2_6_10",
    "fa__pkm6_fwpkm2_10",
    "fast_weight_layer",
    "titans",
    thorough=["ablations/dot_scores"],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_can_be_built_and_the_papers_have_its_parameters(name):
    cost = model_cost(load_config(name).model)
    assert 0 < cost.active <= cost.total
    if name in PUBLISHED:
        paper = PUBLISHED[name]
        assert cost.total / 1e6 == pytest.approx(paper.total, abs=0.01)
        assert cost.active / 1e6 == pytest.approx(paper.active, abs=0.01)
        assert cost.flops / 1e12 == pytest.approx(paper.flops, rel=0.02)


@pytest.mark.thorough
def test_no_config_reads_text_outside_the_package_but_the_papers(tmp_path, monkeypatch):
    """docs/howto/data.md prepares the ten billion tokens of the paper into `data/`."""
    monkeypatch.chdir(tmp_path)
    for name in CONFIGS:
        data = load_config(name).data
        if isinstance(data, TextData):
            paths = (*data.train_paths, *data.valid_paths)
            if name in (*TABLE_1, *PSWA, "sdm_heads") or name.startswith("ablations/"):
                assert all(path.startswith("data/") for path in paths)
            else:
                assert len(next(stream_documents(data, "train")).tokens) > data.length


def test_a_name_that_stood_in_a_command_stays():
    """Stored commands, logs and results name configs."""
    ablations = "dot_scores four_heads_top8 one_head_top32 without_addressing_loss without_gating"
    ablations += " without_lookahead without_loss_weight without_value_norm"
    own = "books_tiny fast_weight_layer matrix_memory recall recall_carried recall_without_memory"
    names = {f"ablations/{name}" for name in ablations.split()}
    names |= {*own.split(), "titans", *TABLE_1, *PSWA}
    assert len(names) == 40
    assert set(CONFIGS) >= names


def test_every_model_of_the_paper_has_a_config():
    assert set(CONFIGS) >= {*TABLE_1, *PSWA}
    assert len(TABLE_1) == len(set(TABLE_1)) == 21


def test_the_papers_models_have_the_settings_of_its_table_2():
    """Appendix C; what its published form leaves out is from the authors' configuration."""
    run = load_config("gdn_swa__pkm6_fwpkm2_10")
    model, training, fast = run.model, run.training, run.model.fast_weight
    assert (model.vocab_size, len(model.mixers), model.model_dim, model.norm_eps) == (
        *(32_000, 12, 768, 1e-5),
    )
    attention, gdn = model.attention, model.gdn
    assert (attention.head_dim, attention.num_heads, attention.num_kv_heads) == (64, 12, 4)
    assert (gdn.conv_width, gdn.key_head_dim, gdn.value_head_dim) == (4, 64, 64)
    assert gdn.num_key_heads == gdn.num_value_heads == 8
    memories = (model.pkm, 4, 32), (fast.rule, 1, 8)
    for memory, heads, top_k in memories:
        assert (memory.key_dim, memory.value_dim, memory.num_subkeys) == (512, 512, 512)
        assert (memory.num_heads, memory.top_k) == (heads, top_k)
    assert fast.chunk_size == 512
    dense = load_config("gdn_swa__fwmlp2_6_10").model.fast_weight.rule
    assert (dense.key_dim, dense.value_dim, dense.learning_rate) == (512, 512, 0.1)
    lact = load_config("lact").model.mixer_configs[0]
    assert (lact.window, lact.chunk_size) == (2048, 512)
    optimizer = run.optimizer
    assert (optimizer.learning_rate, optimizer.final_fraction) == (3e-4, 0.1)
    assert (optimizer.warmup_steps, optimizer.weight_decay) == (100, 0.1)
    assert (training.batch_size, training.batch_size // training.micro_batches) == (128, 8)
    assert training.steps == 20_000


def test_every_ablation_changes_the_memories_of_its_parent_alone():
    parent = load_config("gdn_swa__pkm6_fwpkm2_10")
    names = [name for name in CONFIGS if name.startswith("ablations/")]
    models = {name: load_config(name) for name in names}
    assert len({experiment.model for experiment in models.values()} - {parent.model}) == 8
    for name, experiment in models.items():
        fast_weight = parent.model.fast_weight
        back = replace(experiment, model=replace(experiment.model, fast_weight=fast_weight))
        assert replace(back, run_dir=parent.run_dir) == parent, name


@pytest.mark.thorough
def test_ablations_have_the_parameters_of_table_3_where_they_differ_from_the_parents():
    models = {
        name: load_config(f"ablations/{name}")
        for name in ("four_heads_top8", "one_head_top32", "without_gating")
    }
    ungated = model_cost(models["without_gating"].model)
    assert (ungated.total / 1e6, ungated.active / 1e6) == pytest.approx((516.30, 113.72), abs=5e-3)
    wider = model_cost(models["four_heads_top8"].model)
    assert wider.total / 1e6 == pytest.approx(520.24, abs=0.01)
    assert wider.active / 1e6 == pytest.approx(117.69, abs=0.01)
    deeper = model_cost(models["one_head_top32"].model)
    assert deeper.active / 1e6 == pytest.approx(113.76, abs=0.01)


@pytest.mark.thorough
def test_every_part_of_a_config_is_trained_in_one():
    def parts(name):
        experiment = load_config(name)
        model = experiment.model
        found = {*model.mixers, experiment.training.memory.lifetime, type(experiment.data)}
        found.add(type(model.fast_weight.rule) if model.memory_layers else "no memory")
        return found | ({"pkm"} if model.pkm_layers else set())

    assert set().union(*map(parts, CONFIGS)) == set().union(*map(parts, TRAINED))


@pytest.mark.slow
@pytest.mark.slow_cases("titans", "gdn_swa__pkm6_fwpkm2_10")
@pytest.mark.parametrize("name", [*TRAINED, *TRAINED_SLOWLY])
def test_it_trains_when_shrunk(name, tmp_path):
    experiment = shrink(load_config(name), tmp_path)
    result = train(experiment)
    assert result.step == 2
    assert all(value == value for value in result.results["validation"].values())


def shrink(experiment: Experiment, folder: Path) -> Experiment:
    """Two narrow layers, with a memory and a PKM where the original has one, for two steps."""
    model, training = experiment.model, experiment.training
    if isinstance(experiment.data, RecallData):
        data = RecallData(
            length=32, num_facts=2, num_keys=4, num_values=4, min_distance=8, num_valid=2
        )
    else:
        text = folder / "text.txt"
        text.write_text("It was the best of times, it was the worst of times. " * 20)
        data = TextData(train_paths=(str(text),), valid_paths=(str(text),), length=32)
    rule = replace(model.fast_weight.rule, value_dim=8)
    if isinstance(rule, FwPKM):
        rule = replace(rule, key_dim=8, num_subkeys=8, top_k=2)
    elif isinstance(rule, SDM):
        rule = replace(rule, num_subkeys=8, num_writes=2, num_reads=2)
    else:
        rule = replace(rule, key_dim=8, hidden_dim=8)
    small = replace(
        model,
        vocab_size=vocab_size(data),
        model_dim=16,
        mlp_dim=16,
        window=8,
        mixers=model.mixers[-2:],
        memory_layers=(1,) if model.memory_layers else (),
        pkm_layers=(0,) if model.pkm_layers else (),
        attention=replace(
            model.attention, num_heads=2, num_kv_heads=1, head_dim=8, rotary_fraction=0.5
        ),
        gdn=replace(
            model.gdn, num_key_heads=1, num_value_heads=2, key_head_dim=8, value_head_dim=8
        ),
        matrix=replace(
            model.matrix, num_key_heads=1, num_value_heads=2, key_head_dim=8, value_head_dim=8
        ),
        fast_weight=replace(model.fast_weight, rule=rule, chunk_size=8),
        lact=replace(
            model.lact,
            **{"num_heads": 2, "num_fast_heads": 2, "hidden_dim": 4, "low_rank": 2},
            **{"chunk_size": 8, "window": 8},
        ),
        titans=replace(model.titans, num_heads=2, head_dim=8, chunk_size=8),
        pkm=replace(model.pkm, num_subkeys=8, key_dim=8, value_dim=8, num_heads=2, top_k=2),
    )
    groups = 2 if training.memory.lifetime == "batch" else 1
    return replace(
        experiment,
        model=small,
        data=data,
        training=replace(
            training,
            steps=2,
            batch_size=2,
            micro_batches=1,
            memory=replace(training.memory, groups=groups),
            validation_batches=1,
        ),
        run_dir=str(folder / "run"),
    )
