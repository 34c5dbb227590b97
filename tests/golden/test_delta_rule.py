"""The gated delta rule, both forms, against the authors' implementation."""

import jax
import jax.numpy as jnp
import pytest

from fwpkm_jax.core.numerics import l2_normalize
from fwpkm_jax.core.recurrence.gated_delta import (
    GatedDeltaOutput,
    chunk_gated_delta_rule,
    recurrent_gated_delta_rule,
)
from tests.golden.vectors import assert_all_match, config_values, load

KIND = "delta_rule"
INPUTS = ("query", "key", "value", "g", "beta")


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_delta_rule_matches_the_reference(golden_path, dtype, form):
    config, arrays = load(golden_path)
    # The file's own `form` made the numbers; both forms have to reproduce them.
    config = config_values(
        golden_path,
        config,
        required=("B", "T", "H", "K", "V", "chunk", "form", "l2norm_eps", "qk_l2norm"),
        known={"query_scale": "K**-0.5 after the l2 norm"},
    )
    batch, length, heads, key_dim = (config[name] for name in "BTHK")
    assert arrays["query"].shape == (batch, length, heads, key_dim)
    assert arrays["value"].shape == (batch, length, heads, config["V"])
    start = arrays.get("initial_state")
    start = None if start is None else jnp.asarray(start, dtype)

    def rule(query, key, value, g, beta, start):
        if config["qk_l2norm"]:
            query, key = (l2_normalize(x, eps=config["l2norm_eps"]) for x in (query, key))
        options = {"log_decay": g, "beta": beta, "initial_state": start, "scale": key_dim**-0.5}
        if form == "recurrent":
            return recurrent_gated_delta_rule(query, key, value, **options)
        chunk_size = config["chunk"] or 64
        return chunk_gated_delta_rule(query, key, value, **options, chunk_size=chunk_size)

    @jax.jit
    def evaluate(inputs, start, cotangent):
        result, pullback = jax.vjp(rule, *inputs, start)
        results = result._asdict()
        if cotangent is not None:
            state_cotangent = jnp.zeros_like(result.final_state)
            gradients = pullback(GatedDeltaOutput(cotangent, state_cotangent))
            names = [f"d_{name}" for name in (*INPUTS, "initial_state")]
            results |= dict(zip(names, gradients, strict=True))
        return results

    inputs = [jnp.asarray(arrays[name], dtype) for name in INPUTS]
    cotangent = arrays.get("cotangent")
    cotangent = None if cotangent is None else jnp.asarray(cotangent, dtype)
    results = evaluate(inputs, start, cotangent)
    assert_all_match(
        results,
        arrays,
        inputs=(*INPUTS, "initial_state", "cotangent"),
        path=golden_path,
        dtype=dtype,
    )
