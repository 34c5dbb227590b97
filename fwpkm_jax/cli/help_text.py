"""`--help` of `fwpkm train`, without the sections that a config does not use."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import io
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from fwpkm_jax.config import Experiment, shipped_configs
from fwpkm_jax.layers.mixers.registry import mixer_config
from fwpkm_jax.layers.partition import MeshConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.training.runs.processes import DistributedConfig

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_BOX = re.compile(r"╭─ (\S+) options ─")


@contextlib.contextmanager
def without_unused_sections(experiment: Experiment) -> Iterator[None]:
    """Removes the options of unused sections from the help that is printed in this context.

    If the output cannot show the frames of sections, the whole help is printed.
    """
    printed = _Captured(sys.stdout)
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        unused, text = unused_sections(experiment), printed.text()
        short = _without(text, unused)
        print(short, end="")
        if short != text:
            listed = textwrap.fill(f"{', '.join(unused)}.", width=80)
            print(f"This config does not use the sections\n{listed}\n--help-all shows them too.")
        print(f"\nShipped configs:\n{textwrap.fill('  '.join(shipped_configs()), width=80)}")


def unused_sections(experiment: Experiment) -> list[str]:
    """The model's sections that no layer reads; `mesh` and `distributed` if left at defaults."""
    model = [f"model.{name}" for name in _unused_in_model(experiment.model)]
    several = (("mesh", MeshConfig()), ("distributed", DistributedConfig()))
    return model + [name for name, one in several if getattr(experiment, name) == one]


def _unused_in_model(model: ModelConfig) -> list[str]:
    used = _Reads(model)
    for mixer in model.mixers:
        if isinstance(mixer, str):
            mixer_config(mixer, used)
    names = used.names
    names |= {"fast_weight"} if model.memory_layers else set()
    names |= {"pkm"} if model.pkm_layers else set()
    names |= {"experts"} if model.expert_layers else set()
    sections = [
        field.name
        for field in dataclasses.fields(model)
        if dataclasses.is_dataclass(getattr(model, field.name))
    ]
    return [name for name in sections if name not in names | {"fast_weight_layer"}]


class _Reads:
    """Wraps a model's configuration and records which of its fields are read."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self._model, name)


class _Captured(io.TextIOWrapper):
    """Collects printed text; its encoding and `isatty` are those of the stream `like`."""

    def __init__(self, like: Any) -> None:
        super().__init__(io.BytesIO(), encoding=codecs.lookup(like.encoding or "utf-8").name)
        self._like = like

    def isatty(self) -> bool:
        return self._like.isatty()

    def text(self) -> str:
        """Everything that was printed."""
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)  # pyright: ignore


def _without(text: str, sections: Sequence[str]) -> str:
    """The help without the frames of some sections and of the sections inside them."""
    kept, dropping = [], False
    for line in text.splitlines(keepends=True):
        plain = _COLOURS.sub("", line)
        if (box := _BOX.match(plain)) is not None:
            dropping = any(f"{box[1]}.".startswith(f"{name}.") for name in sections)
        if not dropping:
            kept.append(line)
        if plain.startswith("╰"):
            dropping = False
    return "".join(kept)
