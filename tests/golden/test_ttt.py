"""TTT-Linear's and TTT-MLP's writes and reads, against the authors' PyTorch code.

`published/ttt_*.npz` hold what `TTTLinear.ttt` and `TTTMLP.ttt` of the repository
test-time-training/ttt-lm-pytorch gave (torch 2.13.0, CPU, float64, from float32 inputs) for drawn
queries, keys, values, shares of the rate in (0, 1) and weights, in three mini-batches of four
tokens, one of whose learned factors is cut off at 0. `w:` are parameters, `d:` gradients, `after:`
the weights after the last mini-batch.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from fwpkm_jax.layers.mixers import Titans, TitansConfig
from fwpkm_jax.layers.mixers.registry import mixer_config
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.rules.titans import TitansMemory, TitansNetwork, TitansWrites
from tests.golden import vectors

FOLDER = Path(__file__).parent / "published"


@pytest.mark.thorough("float64-ttt_linear")
@pytest.mark.parametrize("name", ["ttt_linear", "ttt_mlp"])
def test_ttt_matches_the_published_code(name, dtype):
    file = vectors.open_file(FOLDER / f"{name}.npz", dtype)
    sizes = file.config
    model = ModelConfig(titans=TitansConfig(num_heads=sizes["heads"], head_dim=sizes["head_dim"]))
    config = mixer_config(name, model).memory
    # A step of half the rate on the whole square's mean is the published step of half its sum.
    assert config.max_rate == sizes["base_lr"] / 2
    assert config.memory_norm_eps == sizes["norm_eps"]
    layer = Titans(
        TitansConfig(**{**vars(config), "chunk_size": sizes["mini_batch_size"]}),
        sizes["heads"] * sizes["head_dim"],
        rngs=nnx.Rngs(0),
    )

    def run(moving):
        own = nnx.clone(layer)
        own.step_factor.set_value(moving["w:learnable_token_idx"])
        weights = _network(moving, config.depth)
        memory = jax.vmap(own.rule.start)(weights)
        memory = jax.tree.map(lambda x: jnp.broadcast_to(x, (2, *x.shape)), memory)
        outputs = []
        size = sizes["mini_batch_size"]
        none, full = jnp.zeros((2,), jnp.int32), jnp.full((2,), size, jnp.int32)
        for start in range(0, moving["query"].shape[2], size):
            part = {n: moving[n][:, :, start : start + size] for n in ("query", "key", "value")}
            rate = config.max_rate * moving["rate"][:, :, start : start + size]
            base = memory.weights
            read, memory = own._advance(base, memory, _writes(part, rate), part["query"], none)
            memory = own._with_factors(base, memory, full)
            outputs.append(read.reshape(*read.shape[:2], -1))
        return jnp.concatenate(outputs, axis=1), memory

    arrays = dict(file.arrays)
    names = [n for n in arrays if n.startswith("w:") or n in ("query", "key", "value", "rate")]
    moving = {n: arrays[n] for n in names}
    output, pull, memory = jax.vjp(jax.jit(run), moving, has_aux=True)
    (gradients,) = pull(arrays["cotangent"])
    results = {"output": output} | _after(memory)
    results |= {f"d:{n[2:]}" if n[:2] == "w:" else f"d_{n}": x for n, x in gradients.items()}
    file.assert_matches(results)


def _network(arrays, depth: int) -> TitansNetwork:
    numbers = range(1, depth + 1)
    return TitansNetwork(
        scale=arrays["w:ttt_norm_weight"] - 1,
        layers=tuple(arrays[f"w:W{i}"] for i in numbers),
        biases=tuple(arrays[f"w:b{i}"][:, 0] for i in numbers),
        norm_bias=arrays["w:ttt_norm_bias"],
    )


def _writes(part, rate: jax.Array) -> TitansWrites:
    """One write for each token, `[batch, heads, tokens, 1, ...]`."""
    ones = jnp.ones_like(rate)
    return TitansWrites(
        key=part["key"][:, :, :, None],
        value=part["value"][:, :, :, None],
        rate=rate[..., None],
        momentum=jnp.zeros((*rate.shape, 0), rate.dtype),
        forget=jnp.zeros_like(rate),
        real=ones,
    )


def _after(memory: TitansMemory) -> dict[str, jax.Array]:
    weights = memory.weights
    found = {f"after:W{i}": x for i, x in enumerate(weights.layers, 1)}
    return found | {f"after:b{i}": x[:, :, None] for i, x in enumerate(weights.biases or (), 1)}
