"""The MLP with a written down projection, whole, against the published ones.

`published/in_place_convolution.npz`: `Qwen3MLP` of ByteDance-Seed/In-Place-TTT (commit be23248);
`published/in_place_next.npz`: that of yancyou/TTT-NTP (commit c11da91), with plain steps. Both from
`hf_models/hf_qwen3/modeling_qwen3.py`, torch 2.13.0, CPU, float64. The target is the layer's input;
`cot_` is the cotangent of the output, `d_` are gradients.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from fwpkm_jax.layers.mixers import InPlaceConfig
from tests.golden import vectors

FOLDER = Path(__file__).parent / "published"


@pytest.mark.slow_cases("float64-next")
@pytest.mark.thorough
@pytest.mark.parametrize("target", ["next", "convolution"])
def test_the_layer_matches_the_published_one(target, dtype):
    file = vectors.open_file(FOLDER / f"in_place_{target}.npz", dtype)
    layer = InPlaceConfig(**file.config).build(4, rngs=nnx.Rngs(0))
    moving = {name[2:]: file.arrays[name[2:]] for name in file.expected if name.startswith("d_")}

    @jax.jit
    def run(moving):
        own = nnx.clone(layer)
        for name in ("gate", "up", "down", "target"):
            getattr(own, f"{name}_proj").kernel.set_value(moving[name].T)
        # The published product takes the target's weight the other way round than a linear map.
        own.target_proj.kernel.set_value(moving["target"])
        if target == "convolution":
            own.target_conv.set_value(jnp.moveaxis(moving["conv"], 2, 0)[..., 0])
        return own(moving["x"])[0]

    output, pull = jax.vjp(run, moving)
    (gradients,) = pull(file.arrays["cot_output"])
    file.assert_matches({"output": output, **{f"d_{name}": x for name, x in gradients.items()}})
