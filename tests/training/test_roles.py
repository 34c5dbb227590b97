"""What the parameters of every kind say about themselves, and the choice of what trains by it."""

import dataclasses

import jax
import pytest
from flax import nnx

from fwpkm_jax.layers import LoRAConfig
from fwpkm_jax.layers.parameters import Declaration
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.models.sharding import declarations
from fwpkm_jax.training.state import trained_names
from fwpkm_jax.training.trained import check_trained
from tests.training.tiny_config import get_config

# By the ends of their paths; all others are linear maps.
ROLES = {
    "norm_scale": ("norm/weight", "fast_norm/weight", "query_scale", "mixer/scale"),
    "scale": ("fast_query_scale", "fast_key_scale"),
    "bias": ("/bias", "biases/0", "biases/1", "shift", "norm_bias", "head_bias"),
    "gate": ("A_log", "dt_bias", "step_factor"),
    "statistic": ("query_mean", "query_variance"),
    "convolution": ("conv_weight",),
    "embedding": ("embedding", "forward/keys", "forward/values"),
    "head": ("head",),
}


@pytest.fixture(scope="module")
def params():
    tiny = get_config().model
    gdn = dataclasses.replace(tiny.gdn, num_key_heads=2, num_value_heads=2)
    pkm = dataclasses.replace(
        tiny.pkm, num_subkeys=4, top_k=2, key_dim=8, query_batch_norm=True, query_norm=False
    )
    model = dataclasses.replace(
        tiny,
        mixers=("gdn", "lact", "ttt_mlp"),
        gdn=gdn,
        lact=dataclasses.replace(tiny.lact, num_heads=2, num_fast_heads=2),
        titans=dataclasses.replace(tiny.titans, num_heads=2),
        pkm_layers=(0,),
        pkm=pkm,
        lora=LoRAConfig(maps=("blocks/1/mixer/o_proj",), rank=2),
        mlp_bias=True,
        head_bias=True,
    )
    return jax.eval_shape(lambda: nnx.state(LanguageModel(model, rngs=nnx.Rngs(0))))


def test_every_kind_of_parameter_has_its_role(params):
    def expected(path):
        found = {role for role, ends in ROLES.items() if path.endswith(ends)}
        if "scale" in found:
            found -= {"norm_scale"}  # Of the ends of both, the longer one.
        return found.pop() if found else "matrix"

    said = {path: declared.role for path, declared in declarations(params).items()}
    assert said == {path: expected(path) for path in said}
    assert {*said.values()} == {"matrix", *ROLES}
    decayed = {declared.role for declared in declarations(params).values() if declared.decays}
    assert decayed == {"matrix", "embedding", "head", "convolution"}


def test_what_is_as_wide_as_the_model_is_split_in_maps_and_whole_in_biases(params):
    said = declarations(params)
    for path, first, last in [
        ("blocks/1/feed_forward/up_proj", "embed", "mlp"),
        ("blocks/1/feed_forward/down_proj", "mlp", "embed"),
        ("blocks/0/mixer/out_proj", "heads", "embed"),
    ]:
        assert said[f"{path}/kernel"].axes == (first, last)
        if f"{path}/bias" in said:
            assert said[f"{path}/bias"].axes == (None if last == "embed" else last,)
    # A low-rank update is split as its map: rows of the first factor, columns of the second.
    assert said["blocks/1/mixer/o_proj/lora_a"].axes == ("heads", None)
    assert said["blocks/1/mixer/o_proj/lora_b"].axes == (None, "embed")


def test_as_many_axes_as_dimensions_are_declared():
    for axes in (("heads",), ("heads", "embed", None, None)):
        with pytest.raises(ValueError, match=r"\[2, 3, 4\] is declared with the axes"):
            Declaration(role="matrix", axes=axes).axes_of((2, 3, 4))
    assert Declaration(role="matrix").axes_of((2, 3)) == (None, None)


def test_a_whole_role_is_named_to_train_it(params):
    said = declarations(params)
    chosen = trained_names(params, ("role=norm_scale|gate", "head"))
    assert chosen == {path for path, x in said.items() if x.role in ("norm_scale", "gate")} | {
        "head"
    }
    assert not trained_names(params, ("role=norm",))  # The beginning of a role is none.
    with pytest.raises(ValueError, match=r"'role=norm' matches no parameter; .* roles are bias, "):
        check_trained(params, ("role=norm",))
