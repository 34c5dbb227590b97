"""Checks of arguments: axes by name, trees by shape."""

import doctest
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from fwpkm_jax.core import checks
from fwpkm_jax.core.checks import check_arrays, check_key, check_rngs, check_tree
from fwpkm_jax.layers import (
    PKM,
    Experts,
    ExpertsConfig,
    FastWeight,
    FastWeightConfig,
    FastWeightLayer,
    FastWeightLayerConfig,
    PKMConfig,
    SwiGLU,
)
from fwpkm_jax.layers.mixers.registry import mixer_config, mixer_names
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.rules import RULES, AbstractChunkRule


def test_the_example():
    assert doctest.testmod(checks).failed == 0


def test_axes_of_one_name_have_one_size_and_come_back():
    sizes = check_arrays(
        x=(jnp.zeros((2, 3)), "float batch length"),
        mask=(jnp.ones((2, 3), bool), "mask batch length"),
        ids=(jnp.zeros((3, 1), jnp.int32), "int length places"),
        absent=(None, "float batch"),
        sizes={"length": 3},
    )
    assert sizes == {"batch": 2, "length": 3, "places": 1}


@pytest.mark.parametrize(("shape", "added"), [((2, 8, 6), "x[:, :, None]"), ((8, 1, 6), "x[None]")])
def test_the_axis_that_is_missing_is_named(shape, added):
    sizes = {"heads": 1, "key": 6}
    with pytest.raises(ValueError, match=re.escape(f"add one, as {added}.")):
        check_arrays(x=(jnp.zeros(shape), "float batch length heads key"), sizes=sizes)


def test_what_is_no_array_is_named():
    with pytest.raises(ValueError, match=r"x is a list; expected an array \[batch\]"):
        check_arrays(x=([1.0], "float batch"))


TREE = {"keys": jnp.zeros((2, 3)), "values": jnp.zeros((4,))}


@pytest.mark.parametrize(
    ("tree", "leading", "message"),
    [
        (TREE, ("groups",), r"memory\['keys'\] is float32\[2, 3\].*axis of groups is missing"),
        ({"keys": TREE["keys"]}, (), r"memory is a tree of \['keys'\] \[2, 3\]; expected a tree"),
        (TREE | {"values": jnp.zeros((5,))}, (), r"\['values'\] is float32\[5\]; expected \[4\]"),
        ({"keys": jnp.zeros((6, 2, 3)), "values": jnp.zeros((5, 4))}, ("groups",), "groups=6, 4"),
        (TREE | {"values": jnp.zeros((4,), jnp.int32)}, (), "of floats"),
    ],
)
def test_trees_that_differ_are_refused(tree, leading, message):
    with pytest.raises(ValueError, match=message):
        check_tree("memory", tree, TREE, leading=leading)


def test_a_tree_with_leading_axes_is_taken():
    several = {name: jnp.stack([x] * 5) for name, x in TREE.items()}
    check_tree("memory", several, TREE, leading=("groups",))


def test_a_number_without_axes_is_told_from_one_for_each_group():
    one = {"count": jnp.zeros(())}
    check_tree("memory", one, one)
    check_tree("memory", {"count": jnp.zeros(5)}, one, leading=("groups",))
    with pytest.raises(ValueError, match="take one group"):
        check_tree("memory", {"count": jnp.zeros(5)}, one)


def test_random_keys_and_streams_that_are_none_are_named():
    with pytest.raises(ValueError, match=r"rngs is 0 \(int\); expected .* nnx\.Rngs\(0\)"):
        check_rngs(0)
    for wrong in (0, jnp.zeros(3), "a"):
        with pytest.raises(ValueError, match=r"expected a random key, as jax\.random\.key\(0\)"):
            check_key(wrong)
    check_key(jax.random.key(0))
    check_key(jax.random.PRNGKey(0))


MODEL = ModelConfig(vocab_size=8, model_dim=8)
SHARED = {"norm_eps": 1e-5, "init_std": 0.02, "rngs": 0}


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    "make",
    [
        lambda: LanguageModel(MODEL, rngs=0),
        lambda: FastWeight(FastWeightConfig(), 8, rngs=0),
        lambda: PKM(PKMConfig(), 8, rngs=0),
        lambda: SwiGLU(8, 8, init_std=0.02, rngs=0),
        lambda: Experts(ExpertsConfig(), 8, init_std=0.02, rngs=0),
        lambda: FastWeightLayer(FastWeightLayerConfig(), 8, init_std=0.02, rngs=0),
        *(partial(mixer_config(name, MODEL).build, 8, **SHARED) for name in mixer_names()),
    ],
)
def test_every_layer_names_random_streams_that_are_none(make):
    with pytest.raises(ValueError, match=r"rngs is 0 \(int\); expected random streams"):
        make()


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("cls", [x for x in RULES.values() if issubclass(x, AbstractChunkRule)])
def test_every_memory_names_a_random_key_that_is_none(cls):
    with pytest.raises(ValueError, match=r"rng is 0 \(int\); expected a random key"):
        cls.tiny().init(0)
