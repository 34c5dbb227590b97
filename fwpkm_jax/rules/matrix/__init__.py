"""Matrix memories by name: rules whose memory is a matrix per sequence and head."""

from collections.abc import Mapping

from fwpkm_jax.rules.matrix.base import AbstractMatrixRule, Tokens
from fwpkm_jax.rules.matrix.comba import Comba
from fwpkm_jax.rules.matrix.deltanet import DeltaNet
from fwpkm_jax.rules.matrix.deltaproduct import DeltaProduct
from fwpkm_jax.rules.matrix.falcon import Falcon
from fwpkm_jax.rules.matrix.gated_deltanet import GatedDeltaNet
from fwpkm_jax.rules.matrix.gated_deltanet_channels import GatedDeltaNetChannels
from fwpkm_jax.rules.matrix.gated_rfa import GatedRFA
from fwpkm_jax.rules.matrix.gla import GLA
from fwpkm_jax.rules.matrix.hgrn2 import HGRN2
from fwpkm_jax.rules.matrix.kda import KDA
from fwpkm_jax.rules.matrix.lightning import LightningAttention
from fwpkm_jax.rules.matrix.linear_attention import LinearAttention
from fwpkm_jax.rules.matrix.longhorn import Longhorn
from fwpkm_jax.rules.matrix.mamba2 import Mamba2
from fwpkm_jax.rules.matrix.mesa import Mesa
from fwpkm_jax.rules.matrix.mlstm import MLSTM
from fwpkm_jax.rules.matrix.ojanet import OjaNet
from fwpkm_jax.rules.matrix.omega import Omega
from fwpkm_jax.rules.matrix.retnet import RetNet
from fwpkm_jax.rules.matrix.rwkv7 import RWKV7
from fwpkm_jax.rules.registry import RulesOf, register_rule

for _name, _rule in {
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
    "kda": KDA,
    "rwkv7": RWKV7,
    "hgrn2": HGRN2,
    "lightning": LightningAttention,
    "comba": Comba,
    "gated_deltanet_channels": GatedDeltaNetChannels,
    "mesa": Mesa,
    "falcon": Falcon,
    "omega": Omega,
}.items():
    register_rule(_name, _rule)

MATRIX_RULES: Mapping[str, type[AbstractMatrixRule]] = RulesOf(AbstractMatrixRule)
"""The classes of the registered matrix rules by name, those of other packages included."""

__all__ = ["MATRIX_RULES", "AbstractMatrixRule", "Tokens"]
