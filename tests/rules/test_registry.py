"""The one registry of rules: names from other packages, live views, refusals."""

import dataclasses

import jax.numpy as jnp
import jaxtyping
import pytest

from fwpkm_jax.config import from_json, to_json
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.rules import MATRIX_RULES, RULES, AbstractChunkRule, FwPKM, make_rule, register_rule
from fwpkm_jax.rules.matrix import AbstractMatrixRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneMatrix(AbstractChunkRule):
    """A rule of another package, as short as one can be."""

    key_dim: int = 3
    value_dim: int = 2

    def init(self, rng):
        return jnp.zeros((self.key_dim, self.value_dim))

    def read(self, memory, query):
        return query[:, 0] @ memory, None

    def step(self, memory, chunk):
        raise NotImplementedError


@pytest.fixture
def registered(monkeypatch):
    """Registers until the test ends."""
    before = dict(RULES)
    yield register_rule
    RULES.clear()
    RULES.update(before)


@pytest.fixture
def names_for_rules():
    """Lets a config take a name: it makes the rule before anyone reads the field."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("names_for_rules")
def test_a_registered_rule_is_found_by_name_as_class_and_as_instance(registered):
    registered("one_matrix", OneMatrix)
    assert FastWeightConfig(rule="one_matrix").rule == OneMatrix()
    wide = OneMatrix(key_dim=7)
    registered("wide_matrix", wide)
    assert make_rule("wide_matrix") is wide
    assert "one_matrix" not in MATRIX_RULES


def test_a_rule_needs_no_registration_to_be_configured_and_read_again():
    config = FastWeightConfig(rule=OneMatrix(key_dim=5), chunk_size=4)
    assert from_json(to_json(config), FastWeightConfig) == config


def test_the_view_of_matrix_rules_sees_later_ones(registered):
    before = list(MATRIX_RULES)
    registered("deltanet_again", type("Again", (MATRIX_RULES["deltanet"],), {}))
    assert list(MATRIX_RULES) == [*before, "deltanet_again"]
    assert all(issubclass(rule, AbstractMatrixRule) for rule in MATRIX_RULES.values())
    assert set(MATRIX_RULES) < set(RULES)
    assert "fwpkm" not in MATRIX_RULES


@pytest.mark.usefixtures("names_for_rules")
def test_a_taken_name_and_an_unknown_one_are_refused(registered):
    registered("fwpkm", FwPKM)  # The same again, as a module loaded twice does.
    with pytest.raises(ValueError, match="the name 'fwpkm' is taken by FwPKM; choose another"):
        registered("fwpkm", OneMatrix)
    with pytest.raises(ValueError, match="'my rule' must be an identifier"):
        registered("my rule", OneMatrix)
    with pytest.raises(ValueError, match="'fwpkn' is none of the registered rules"):
        FastWeightConfig(rule="fwpkn")


@pytest.mark.usefixtures("names_for_rules")
def test_a_memory_layer_refuses_what_cannot_be_read_before_it_is_written():
    with pytest.raises(ValueError, match=r"rule=TitansRule.* is no AbstractChunkRule"):
        FastWeightConfig(rule="titans")
