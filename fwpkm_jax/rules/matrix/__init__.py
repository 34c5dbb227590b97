"""Matrix memories by name: rules whose memory is a matrix per sequence and head."""

from fwpkm_jax.rules.matrix.base import AbstractMatrixRule, Tokens
from fwpkm_jax.rules.matrix.deltanet import DeltaNet
from fwpkm_jax.rules.matrix.deltaproduct import DeltaProduct
from fwpkm_jax.rules.matrix.gated_deltanet import GatedDeltaNet
from fwpkm_jax.rules.matrix.gated_rfa import GatedRFA
from fwpkm_jax.rules.matrix.gla import GLA
from fwpkm_jax.rules.matrix.linear_attention import LinearAttention
from fwpkm_jax.rules.matrix.longhorn import Longhorn
from fwpkm_jax.rules.matrix.mamba2 import Mamba2
from fwpkm_jax.rules.matrix.mlstm import MLSTM
from fwpkm_jax.rules.matrix.ojanet import OjaNet
from fwpkm_jax.rules.matrix.retnet import RetNet

MATRIX_RULES: dict[str, type[AbstractMatrixRule]] = {
    "linear_attention": LinearAttention,
    "deltanet": DeltaNet,
    "ojanet": OjaNet,
    "retnet": RetNet,
    "mamba2": Mamba2,
    "gated_rfa": GatedRFA,
    "mlstm": MLSTM,
    "gla": GLA,
    "gated_deltanet": GatedDeltaNet,
    "deltaproduct": DeltaProduct,
    "longhorn": Longhorn,
}

__all__ = ["MATRIX_RULES", "AbstractMatrixRule", "Tokens"]
