"""The registry of all rules by name, those of other packages included."""

from collections.abc import Iterator, Mapping
from typing import Any

from fwpkm_jax.lazy_imports import LazyRegistry
from fwpkm_jax.literals import nearest

DEFAULT_RULE = "fwpkm"
"""The default memory of a layer."""

_MATRIX = "fwpkm_jax.rules.matrix"
_OURS = {
    "fwmlp": "fwpkm_jax.rules.fwmlp:FwMLP",
    "fwpkm": "fwpkm_jax.rules.fwpkm:FwPKM",
    "sdm": "fwpkm_jax.rules.sdm:SDM",
    "lact": "fwpkm_jax.rules.lact:LaCTRule",
    "titans": "fwpkm_jax.rules.titans:TitansRule",
    "linear_attention": f"{_MATRIX}.linear_attention:LinearAttention",
    "deltanet": f"{_MATRIX}.deltanet:DeltaNet",
    "ojanet": f"{_MATRIX}.ojanet:OjaNet",
    "retnet": f"{_MATRIX}.retnet:RetNet",
    "mamba2": f"{_MATRIX}.mamba2:Mamba2",
    "gated_rfa": f"{_MATRIX}.gated_rfa:GatedRFA",
    "mlstm": f"{_MATRIX}.mlstm:MLSTM",
    "gla": f"{_MATRIX}.gla:GLA",
    "gated_deltanet": f"{_MATRIX}.gated_deltanet:GatedDeltaNet",
    "deltaproduct": f"{_MATRIX}.deltaproduct:DeltaProduct",
    "longhorn": f"{_MATRIX}.longhorn:Longhorn",
    "kda": f"{_MATRIX}.kda:KDA",
    "rwkv7": f"{_MATRIX}.rwkv7:RWKV7",
    "hgrn2": f"{_MATRIX}.hgrn2:HGRN2",
    "lightning": f"{_MATRIX}.lightning:LightningAttention",
    "comba": f"{_MATRIX}.comba:Comba",
    "gated_deltanet_channels": f"{_MATRIX}.gated_deltanet_channels:GatedDeltaNetChannels",
    "mesa": f"{_MATRIX}.mesa:Mesa",
    "falcon": f"{_MATRIX}.falcon:Falcon",
    "omega": f"{_MATRIX}.omega:Omega",
    "gated_deltanet2": f"{_MATRIX}.gated_deltanet2:GatedDeltaNet2",
    "preconditioned_gated_deltanet": f"{_MATRIX}.preconditioned:PreconditionedGatedDeltaNet",
    "preconditioned_kda": f"{_MATRIX}.preconditioned:PreconditionedKDA",
    "gated_slot_attention": f"{_MATRIX}.slot_attention:GatedSlotAttention",
    "raven": f"{_MATRIX}.slot_attention:Raven",
    "falcon2": f"{_MATRIX}.falcon_channels:Falcon2",
    "falcon2a": f"{_MATRIX}.falcon_channels:Falcon2A",
    "falcon3": f"{_MATRIX}.falcon_windows:Falcon3",
    "falcon3a": f"{_MATRIX}.falcon_windows:Falcon3A",
    "mamba3": f"{_MATRIX}.mamba3:Mamba3",
    "sdm_heads": f"{_MATRIX}.sdm_heads:SDMHeads",
}


RULES = LazyRegistry(_OURS)
"""Registered rules by name, in the order of registration: classes, or instances."""


def register_rule(name: str, rule: Any) -> None:
    """Registers a rule under a name, before or after configurations are imported.

    A rule for memory layers is an `AbstractChunkRule`; `FastWeightConfig(rule=name)` finds it. A
    matrix rule, an `AbstractMatrixRule`, is also a token mixer of that name.

    Args:
      name: what configurations call it; not the name of another rule.
      rule: the class, if all its fields have defaults, or an instance.

    Raises:
      ValueError: the name is taken, or is no identifier.

    Example:
      >>> from fwpkm_jax import FwMLP, register_rule
      >>> register_rule("small_mlp", FwMLP(key_dim=8, value_dim=8, hidden_dim=8))
    """
    if not name.isidentifier():
        raise ValueError(f"register_rule: the name {name!r} must be an identifier, as 'my_rule'.")
    known = RULES.get(name)
    # A module that was loaded twice registers the same class again.
    places = [(x.__module__, x.__qualname__) for x in map(_class_of, (known, rule))]
    if known is not None and known != rule and places[0] != places[1]:
        raise ValueError(
            f"register_rule: the name {name!r} is taken by {_class_of(known).__qualname__}; choose "
            "another."
        )
    RULES[name] = rule


def load_all() -> None:
    """Imports every rule that is registered."""
    list(RULES.values())


def make_rule(name: str) -> Any:
    """The rule registered under `name`: the instance, or the class with its defaults.

    Raises:
      ValueError: no rule has this name.
    """
    if name not in RULES:
        raise ValueError(
            f"rule={name!r} is none of the registered rules {sorted(RULES)}{nearest(name, RULES)}. "
            "Import the module that registers it, or pass the rule itself."
        )
    rule = RULES[name]
    return rule() if isinstance(rule, type) else rule


class RulesOf(Mapping[str, Any]):
    """The classes of the registered rules of one interface; a live view of `RULES`."""

    def __init__(self, interface: type):
        self._interface = interface

    def __getitem__(self, name: str) -> Any:
        cls = _class_of(RULES[name])
        if not issubclass(cls, self._interface):
            raise KeyError(name)
        return cls

    def __iter__(self) -> Iterator[str]:
        return (name for name in RULES if issubclass(_class_of(RULES[name]), self._interface))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _class_of(rule: Any) -> type:
    return rule if isinstance(rule, type) else type(rule)
