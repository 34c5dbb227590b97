"""The slow product-key memory layer, against the authors' release."""

import jax
from flax import nnx

from fwpkm_jax.layers.pkm import PKM, PKMConfig
from fwpkm_jax.paper.release.names import PKM as PKM_NAMES
from tests.golden.vectors import config_values, open_file
from tests.golden.weights import filled

KIND = "pkm"


def test_product_key_memory_matches_the_release(golden_path, dtype):
    file = open_file(golden_path, dtype)
    config = config_values(
        golden_path,
        file.config,
        required=(
            *("B", "T", "input_dim", "output_dim", "mem_heads", "mem_k_dim", "mem_knn"),
            *("mem_n_keys", "mem_v_dim", "mem_query_rmsnorm", "query_bias", "swilu_projection"),
        ),
        known={"mem_share_values": False, "query_norm_eps": 1e-6},
    )
    value_dim = config["output_dim"] if config["mem_v_dim"] == -1 else config["mem_v_dim"]
    layer = PKM(
        PKMConfig(
            num_subkeys=config["mem_n_keys"],
            key_dim=config["mem_k_dim"],
            value_dim=value_dim,
            num_heads=config["mem_heads"],
            top_k=config["mem_knn"],
            query_norm=config["mem_query_rmsnorm"],
            gated=config["swilu_projection"],
        ),
        config["input_dim"],
        out_dim=config["output_dim"],
        rngs=nnx.Rngs(0),
    )
    weights = {name[2:]: x for name, x in file.arrays.items() if name.startswith("w:")}

    def run(hidden, weights):
        return filled(layer, weights, PKM_NAMES)(hidden)[:2]

    def results(hidden, weights, cotangent):
        output, pullback, indices = jax.vjp(run, hidden, weights, has_aux=True)
        d_hidden, d_weights = pullback(cotangent)
        gradients = {f"d:{name}": x for name, x in d_weights.items()}
        return {"output": output, "indices": indices, "d_hidden": d_hidden} | gradients

    arrays = file.arrays
    file.assert_matches(jax.jit(results)(arrays["hidden"], weights, arrays["cotangent"]))
