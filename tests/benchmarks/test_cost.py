"""The table of the paper's models, and what a step of LaCT costs."""

import dataclasses

import pytest

from benchmarks.paper import cost
from benchmarks.paper.published import PUBLISHED, TOKENS_PER_STEP
from fwpkm_jax.layers.mixers.lact import LaCTConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.paper.configs import ablation
from fwpkm_jax.paper.models import TABLE_1, paper_model

LACT = LaCTConfig(num_heads=2, num_fast_heads=2, hidden_dim=6, low_rank=3, chunk_size=4)
SMALL = ModelConfig(vocab_size=13, model_dim=8, mixers=("lact",), mlp_dim=5, lact=LACT)


@pytest.mark.slow
def test_a_row_stands_beside_the_papers_and_fwmlp_has_both_widths(capsys):
    cost.main(["--models", "gdn", "gdn__fwmlp2_6_10"])
    header, _, gdn, narrow, wide = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["model", "total"]
    assert gdn.split() == ["gdn", *["112.11"] * 4, *["22.04"] * 2, "-", "54.44"]
    assert narrow.split()[1:5] == ["118.05"] * 4
    assert wide.split()[-8] == "126.31"


def test_the_papers_flops_are_six_per_active_parameter_and_token_but_for_lact():
    for name, row in PUBLISHED.items():
        ratio = row.flops * 1e12 / (6e6 * row.active * TOKENS_PER_STEP)
        assert ratio == pytest.approx(1, abs=0.02) if name != "lact" else ratio > 1.09


def test_a_step_of_lact_counts_every_product_of_its_fast_networks():
    """8 tokens in chunks of 4: all are read, the first chunk alone is written."""
    step = cost.model_cost(SMALL, tokens=8, length=8)
    # Two heads of width 4 and hidden 6: a matrix has 24 numbers, a low-rank one 3 * (4 + 6) = 30.
    counted_once = 2 * (24 + 2 * 30)
    products = 2 * 24 * (3 * 8 + 6 * 4)
    assert step.flops == 6 * (step.active - counted_once) * 8 + 6 * products


def test_without_lact_a_step_costs_six_operations_per_active_parameter_and_token():
    step = cost.model_cost(dataclasses.replace(SMALL, mixers=("gdn",)), tokens=5)
    assert step.flops == 6 * step.active * 5


@pytest.mark.slow
def test_speed_is_measured_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(cost, "paper_model", lambda name: SMALL)
    options = cost.Options(models=("mine",), measure=True, batch_size=2, length=6, steps=3)
    _, _, row, note = cost.cost_table(options).splitlines()
    assert float(row.split()[-2]) > 0
    assert note.startswith("samples/s: training steps of 2 x 6 tokens on one cpu, median of 3")


def test_a_model_the_paper_does_not_have_is_refused():
    with pytest.raises(ValueError, match="'gdm' is none of the paper's models: gdn, "):
        paper_model("gdm")


def test_an_ablation_replaces_fields_of_rule_and_block():
    changed = ablation("mine", rule={"top_k": 3}, weight_by_gate=False).model.fast_weight
    assert (changed.rule.top_k, changed.weight_by_gate, changed.gate_output) == (3, False, True)


def test_the_table_has_the_papers_rows():
    assert tuple(PUBLISHED) == TABLE_1
