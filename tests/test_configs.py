"""Every config file: it loads, its model can be built, and it trains when shrunk."""

from dataclasses import replace
from pathlib import Path

import pytest

from fwpkm_jax.config import Experiment, load_config
from fwpkm_jax.data import RecallData, TextData, vocab_size
from fwpkm_jax.models.parameters import count_parameters
from fwpkm_jax.training.loop import train

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("**/*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_model_of_every_config_can_be_built(path):
    model = load_config(path).model
    counts = count_parameters(model)
    assert 0 < counts.active <= counts.total


def test_the_papers_hybrid_has_the_papers_parameters():
    path = Path(__file__).parents[1] / "configs" / "gdn_swa__pkm6_fwpkm2_10.py"
    total, active = count_parameters(load_config(path).model)
    assert total / 1e6 == pytest.approx(516.31, abs=0.01)
    assert active / 1e6 == pytest.approx(113.73, abs=0.01)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_trains_when_shrunk(path, tmp_path):
    experiment = shrink(load_config(path), tmp_path)
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
    rule = replace(model.fast_weight.rule, num_subkeys=8, key_dim=8, value_dim=8, top_k=2)
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
        fast_weight=replace(model.fast_weight, rule=rule, chunk_size=8),
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
