"""The large-chunk fast SwiGLU against the published operator."""

import jax
import jax.numpy as jnp

from fwpkm_jax.core.chunks import map_groups
from fwpkm_jax.rules.gradient import GradientChunk
from fwpkm_jax.rules.lact import LaCTRule, SwiGLUWeights
from tests.golden.vectors import config_values, open_file

KIND = "lact_op"


def test_the_operator_matches_the_published_one(golden_path, dtype):
    file = open_file(golden_path, dtype)
    config = config_values(
        golden_path,
        file.config,
        required=("B", "T", "chunk_size", "dh", "dk", "dv", "form", "use_muon"),
        known={"norm_eps": 1e-5},
    )
    rule = LaCTRule(
        key_dim=config["dk"],
        value_dim=config["dv"],
        hidden_dim=config["dh"],
        pre_norm={"prenorm": True, "postnorm": False}[config["form"]],
        muon=config["use_muon"],
    )

    def run(inputs):
        """Every sequence has its own memory: a group of one."""
        weights = SwiGLUWeights(inputs["w0"], inputs["w1"], inputs["w2"])
        tokens = {name: inputs[name][:, None] for name in inputs if name[0] != "w"}
        ones = jnp.ones(tokens["v"].shape[:-1], dtype)
        momentum = tokens["momentum"][..., 0] if "momentum" in tokens else None
        sequence = GradientChunk(
            *(tokens["q"][:, :, :, None], tokens["v"], ones, ones, ones),
            key=tokens["k"][:, :, :, None],
            rates=jnp.concatenate([tokens[f"lr{i}"] for i in range(3)], axis=-1),
            momentum=momentum,
        )
        memory = jax.vmap(rule.start)(weights)
        out = map_groups(
            lambda m, s: rule.run(m, s, chunk_size=config["chunk_size"]).output, memory, sequence
        )
        return out[:, 0]

    names = ["w0", "w1", "w2", "q", "k", "v", "lr0", "lr1", "lr2", "momentum"]
    inputs = {name: file.arrays[name] for name in names if name in file.arrays}

    @jax.jit
    def evaluate(inputs):
        output, pullback = jax.vjp(run, inputs)
        (gradients,) = pullback(file.arrays["cotangent"])
        return {"output": output, **{f"d_{name}": x for name, x in gradients.items()}}

    file.assert_matches(evaluate(inputs))
