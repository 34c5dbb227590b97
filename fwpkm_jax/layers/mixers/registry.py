"""The registry of all mixers by name, those of other packages included."""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from fwpkm_jax.layers.mixers.base import AbstractMixerConfig
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMixerConfig
from fwpkm_jax.literals import nearest
from fwpkm_jax.rules.matrix import MATRIX_RULES

MixerBuilder = Callable[[Any], AbstractMixerConfig]
"""Makes a mixer's configuration from the sections of a `ModelConfig`."""


class _Registered(NamedTuple):
    config: AbstractMixerConfig | MixerBuilder
    module: str  # The module that registered it.


_OURS = {
    "attention": "attention",
    "swa": "attention",
    "gdn": "gated_delta_net",
    "lact": "lact",
    "in_place_ttt": "in_place",
    "titans": "titans_variants",
    "ttt_linear": "titans_variants",
    "ttt_mlp": "titans_variants",
    "titans_mac": "titans_variants",
    "titans_mag": "titans_variants",
    "titans_mal": "titans_variants",
}
"""This package's mixers, and the module beside this one that registers each when it is imported."""

_MIXERS: dict[str, _Registered] = {}


def register_mixer(name: str, config: AbstractMixerConfig | MixerBuilder) -> None:
    """Makes `name` a mixer that `ModelConfig.mixers` may name.

    Call it where the mixer is defined, so that importing that module suffices; a run finds the
    module again through `Experiment.plugins`. A registered matrix rule is a mixer of its name
    without this call.

    Args:
      name: as in `--model.mixers NAME ...`.
      config: the configuration that the name stands for, or a function that makes it from the
        `ModelConfig`.

    Raises:
      ValueError: the name is empty or belongs to another module's mixer.
      TypeError: `config` is neither.

    Example:
      >>> from fwpkm_jax.layers.mixers import AttentionConfig, register_mixer
      >>> register_mixer("wide_attention", AttentionConfig(num_heads=4, head_dim=128))
    """
    if not name:
        raise ValueError("name='' names no mixer; give it at least one character.")
    if not isinstance(config, AbstractMixerConfig) and not callable(config):
        raise TypeError(
            f"config of the mixer {name!r} is {config!r}; it must be an AbstractMixerConfig or a "
            "function that makes one from a ModelConfig."
        )
    module = _calling_module()
    known = _find(name)
    # A module that is imported again registers its mixers again.
    if known is not None and known.module != module:
        raise ValueError(
            f"The mixer {name!r} is registered by {known.module} already; choose another name."
        )
    _MIXERS[name] = _Registered(config, module)


def _calling_module() -> str:
    """The module that called `register_mixer`."""
    frame = sys._getframe()
    # Runtime type checking, as in tests, adds stack frames in between.
    while frame.f_globals["__name__"].split(".")[0] in ("jaxtyping", "beartype") or (
        frame.f_globals["__name__"] == __name__
    ):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_globals["__name__"]


def load_all() -> None:
    """Imports every mixer of this package."""
    for module in set(_OURS.values()):
        importlib.import_module(f"{__package__}.{module}")


def mixer_names() -> tuple[str, ...]:
    """Every name that `ModelConfig.mixers` may hold now."""
    return tuple(dict.fromkeys([*_OURS, *_MIXERS, *MATRIX_RULES]))


def mixer_config(name: str, model: Any) -> AbstractMixerConfig:
    """The configuration that a name stands for.

    Raises:
      ValueError: settings of the model contradict each other.
    """
    config = _registered(name).config
    return config if isinstance(config, AbstractMixerConfig) else config(model)


def check_mixer_name(name: str, place: str) -> None:
    """Raises ValueError unless a mixer of that name is registered; `place` is where it stands."""
    if _find(name) is None:
        names = mixer_names()
        raise ValueError(
            f"{place}={name!r} is none of {', '.join(names)}{nearest(str(name), names)}. For a "
            "mixer of your own, call layers.mixers.register_mixer in its module and name the "
            "module in plugins."
        )


def mixer_module(name: str) -> str:
    """The module that registered a mixer."""
    return _registered(name).module


def _registered(name: str) -> _Registered:
    """What a name of `mixer_names` stands for."""
    found = _find(name)
    if found is None:
        raise KeyError(name)
    return found


def _find(name: str) -> _Registered | None:
    """What a name stands for: a matrix rule, if one is registered by now, or a mixer; else None."""
    if name in _OURS:
        # Importing a module registers its mixers; nobody pays for those that no model names.
        importlib.import_module(f"{__package__}.{_OURS[name]}")
    rule = MATRIX_RULES.get(name)
    return _MIXERS.get(name) if rule is None else _of_rule(name, rule.__module__)


@functools.cache
def _of_rule(name: str, module: str) -> _Registered:
    def build(model: Any) -> MatrixMixerConfig:
        return MatrixMixerConfig.named(name, model.matrix)

    return _Registered(build, module)
