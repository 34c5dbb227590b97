"""What rules read, leave and differentiate to, against their public code.

`published/comba.npz`: `naive_recurrent_comba` of fla-org/flash-linear-attention (commit bc3b101,
torch 2.13.0, CPU, float64), with the query corrected before its norm as in that repository's layer,
norms with eps 1e-6 and p = feedback * key; `d_` are gradients.
`published/rwkv7.npz`: `time_mixing` of BlinkDL/RWKV-LM, RWKV-v7/rwkv_v7_numpy.py (commit 524481d),
float64, token by token with weights that pass the drawn vectors on; one key has norm 1e-3.
Others: the function named below of fla-org/flash-linear-attention (commit bc3b101, torch 2.13.0,
CPU, with its casts to float32 replaced by casts to float64 and a scale of 1); `cot_` are cotangents
of outputs, `d_` gradients.
`published/gated_deltanet2.npz`: `naive_recurrent_gdn2`;
`published/preconditioned_gated_deltanet.npz`: `naive_recurrent_precond_gated_delta_rule`;
`published/preconditioned_kda.npz`: `naive_recurrent_precond_kda`;
`published/gated_slot_attention.npz`: `naive_recurrent_gsa`, and `published/raven.npz` the same with
the decays and writes of goombalab/raven (commit afc329f), `raven/layers/raven.py`;
`published/mamba3.npz`: `mamba3_siso_step_ref` of state-spaces/mamba (commit e9594ce),
`tests/ops/triton/test_mamba3_siso.py`, its last memory turned back by its last angle.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.rules.matrix import MATRIX_RULES, Tokens
from fwpkm_jax.rules.matrix.base import GateInputs
from fwpkm_jax.rules.matrix.comba import Comba
from fwpkm_jax.rules.matrix.mamba3 import Mamba3State
from fwpkm_jax.rules.matrix.preconditioned import PreconditionedState
from fwpkm_jax.rules.matrix.rwkv7 import RWKV7
from tests.golden import vectors

FOLDER = Path(__file__).parent / "published"
each_form = pytest.mark.parametrize(
    "form", ["run", pytest.param("recurrent", marks=pytest.mark.thorough)]
)


@pytest.mark.slow
@each_form
def test_comba_matches_the_published_code(form, dtype):
    file = vectors.open_file(FOLDER / "comba.npz", dtype)
    rule = Comba(**file.config)

    def run(moving):
        query, key, value = rule.features(moving["query"], moving["key"], moving["value"])
        tokens = Tokens(query, key, value, moving["log_decay"], moving["strength"])
        return tuple(getattr(rule, form)(tokens, moving["start"]))

    names = ("query", "key", "value", "log_decay", "strength", "start")
    moving = {name: file.arrays[name] for name in names}
    (output, after), pull = jax.vjp(jax.jit(run), moving)
    (gradients,) = pull((file.arrays["cotangent"], file.arrays["d_after"]))
    results = {f"d_{name}": x for name, x in gradients.items()}
    file.assert_matches(results | {"output": output, "after": after})


@pytest.mark.thorough("float64-run")
@each_form
def test_rwkv7_matches_the_authors_numpy_code(form, dtype):
    file = vectors.open_file(FOLDER / "rwkv7.npz", dtype)
    rule, heads = RWKV7(), file.config["heads"]

    @jax.jit
    def run(arrays):
        def by_head(x):
            return x.reshape(1, len(x), heads, -1)

        query, key, value, decay, strength = (
            by_head(arrays[name]) for name in ("query", "key", "value", "decay", "strength")
        )
        gates = rule.gates(GateInputs(decay.shape[:3], decay, strength, None))
        start = jnp.swapaxes(arrays["start"], -1, -2)[None]  # The authors' is [value, key].
        found = getattr(rule, form)(Tokens(query, key, value, *gates), start)
        return {"output": found[0][0], "after": jnp.swapaxes(found[1][0], -1, -2)}

    file.assert_matches(run(dict(file.arrays)))
    assert np.min(np.linalg.norm(np.asarray(file.arrays["key"]), axis=-1)) < 0.01


def _gated_deltanet2(rule, form, x):
    strength = jnp.concatenate([x["erase"], x["write"]], axis=-1)
    tokens = Tokens(x["query"], x["key"], x["value"], x["log_decay"], strength)
    out = getattr(rule, form)(tokens, x["start"])
    return {"output": out.output, "after": out.final_state}


def _preconditioned_kda(rule, form, x):
    strength = jnp.stack([x["strength"], x["enters"], x["fades"]], axis=-1)
    tokens = Tokens(x["query"], x["key"], x["value"], x["log_decay"], strength)
    output, after = getattr(rule, form)(tokens, PreconditionedState(x["start"], x["curvature"]))
    return {"output": output, "after": after.matrix, "curvature_after": after.curvature}


def _preconditioned_gated_deltanet(rule, form, x):
    # This function norms queries and keys itself.
    unit = {name: x[name] / jnp.linalg.norm(x[name], axis=-1, keepdims=True) for name in QUERY_KEY}
    return _preconditioned_kda(rule, form, x | unit)


def _slot_attention(rule, form, x):
    # The reference keeps the slots' keys as [key, slot].
    start = jnp.concatenate([jnp.swapaxes(x["keys"], -1, -2), x["start"]], axis=-1)
    tokens = Tokens(x["query"], x["key"], x["value"], x["log_decay"], x.get("strength"))
    output, after = getattr(rule, form)(tokens, start)
    width = x["key"].shape[-1]
    keys = jnp.swapaxes(after[..., :width], -1, -2)
    return {"output": output, "keys_after": keys, "after": after[..., width:]}


def _mamba3(rule, form, x):
    share = jax.nn.sigmoid(x["share"])
    gains = jnp.stack([share * x["step"], (1 - share) * x["step"]], axis=-1)
    angle = jnp.pi * jnp.tanh(x["angle"]) * x["step"][..., None]
    strength = jnp.concatenate([gains, angle], axis=-1)
    start = Mamba3State(x["start"], x["last_key"], x["last_value"])
    tokens = Tokens(x["query"], x["key"], x["value"], x["log_decay"], strength)
    output, after = getattr(rule, form)(tokens, start)
    return {"output": output, "after": after.matrix}


QUERY_KEY = "query", "key"
CASES = {
    "gated_deltanet2": _gated_deltanet2,
    "preconditioned_gated_deltanet": _preconditioned_gated_deltanet,
    "preconditioned_kda": _preconditioned_kda,
    "gated_slot_attention": _slot_attention,
    "raven": _slot_attention,
    "mamba3": _mamba3,
}


@pytest.mark.by_default(
    "float64-gated_deltanet2-run",
    "float64-mamba3-run",
    thorough=["float64-preconditioned_gated_deltanet-run"],
)
@each_form
@pytest.mark.parametrize("name", CASES)
def test_a_rule_of_2026_matches_the_public_code(name, form, dtype):
    file = vectors.open_file(FOLDER / f"{name}.npz", dtype)
    rule = MATRIX_RULES[name](**file.config)
    moving = {name[2:]: file.arrays[name[2:]] for name in file.expected if name.startswith("d_")}
    found, pull = jax.vjp(jax.jit(lambda moving: CASES[name](rule, form, moving)), moving)
    (gradients,) = pull({name: file.arrays[f"cot_{name}"] for name in found})
    file.assert_matches(found | {f"d_{name}": x for name, x in gradients.items()})
