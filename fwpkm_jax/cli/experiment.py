"""The experiment that a command line of `fwpkm train` asks for."""

import dataclasses
import json
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from tyro.constructors import (
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructFieldSpec,
    StructTypeInfo,
)

from fwpkm_jax.cli.options import before_others
from fwpkm_jax.config import Experiment, load_config, read_experiment
from fwpkm_jax.config_json import from_json, to_json
from fwpkm_jax.data import vocab_size
from fwpkm_jax.io.atomic import check_local
from fwpkm_jax.io.options import read_options
from fwpkm_jax.layers import FastWeightConfig
from fwpkm_jax.layers.mixers import AbstractMixerConfig, AttentionConfig, GatedDeltaNetConfig
from fwpkm_jax.layers.mixers.registry import mixer_config, mixer_names
from fwpkm_jax.models.config import Mixer, ModelConfig
from fwpkm_jax.rules import FwPKM
from fwpkm_jax.run.train import resume_experiment

_DESCRIPTION = """Trains {origin}, whose own values are the defaults below.

Another one: the name of a shipped config (`fwpkm configs`), or a .py file.

A run goes on with --resume RUN. --base RUN --run_dir NEW starts a new run from
the weights of RUN; with --add_memory, two memories are put into it and they
alone are trained. What has no option is set in a config file."""

_SYNONYMS = {
    "lr": "optimizer.learning_rate",
    "layers": "model.mixers, which names the mixer of each layer",
    "num_layers": "model.mixers, which names the mixer of each layer",
    "dtype": "model.activation_dtype",
    "batch_size": "training.batch_size",
    "epochs": "training.steps",
    "d_model": "model.model_dim",
    "heads": "model.attention.num_heads",
    "vocab": "model.vocab_size",
}
"""What other programs call some options."""

_IN_FILES = {
    ModelConfig: (
        *("mlp_activation", "mlp_bias", "expert_layers", "post_norm_layers"),
        *("sandwich_norm_layers", "embedding_scale", "norm_eps", "norm_offset"),
    ),
    AttentionConfig: (
        *("window", "linear_scaling", "norm_offset", "bias", "output_bias", "score_dim"),
    ),
    GatedDeltaNetConfig: ("activation", "norm_eps", "max_strength"),
}
"""Fields without an option, which are part of an imported model's architecture."""


def parse_command_line(
    arguments: Sequence[str], *, default: str | Path, prog: str = "fwpkm train"
) -> Experiment:
    """The experiment that a command line asks for.

    `[CONFIG] [--section.field VALUE ...]` starts from a config. `--resume RUN [...]` starts from
    the configuration of a run; training then continues that run. `--base RUN --run_dir NEW [...]`
    also starts from the configuration of a run; a new run then starts from its weights.
    `--add_memory` beside it changes the defaults as `with_memories` says.

    Args:
      arguments: the command line without the program's name.
      default: name or path of the config that is used if the command line names none.
      prog: the program's name in `--help`.

    Raises:
      SystemExit: see `read_options`.
      ValueError: values do not go together, or a plugin is not installed; see also `load_config`.
      FileNotFoundError: there is no such config or run.
    """
    arguments = list(arguments)
    named = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    first, others = before_others(arguments)
    if first.add_memory:
        if first.base is None:
            raise ValueError("--add_memory puts memories into a trained run; name it, --base RUN.")
        arguments = [one for one in arguments if one not in ("--add_memory", "--add-memory")]
    options = {argument.split("=")[0].replace("-", "_").lstrip("_") for argument in others}
    for option in options & _SYNONYMS.keys():
        raise ValueError(f"--{option} is not an option; use --{_SYNONYMS[option]}.")
    if first.resume is not None:
        for extra in filter(None, (named, "--run_dir" * ("run_dir" in options))):
            raise ValueError(
                f"--resume {first.resume} continues that run with its own configuration; leave "
                f"out {extra}."
            )
        # Plugins are imported by now; those of the run stay as they are.
        origin, experiment, arguments = "that run", resume_experiment(first.resume), others
    elif first.base is not None and named is None:
        if not options & {"run_dir", "help", "h"}:
            raise ValueError(f"--base {first.base} starts a new run; name its --run_dir.")
        origin, experiment = "from that run", read_experiment(first.base)
    else:
        origin = str(default) if named is None else named
        check_local(origin, "config")
        experiment = load_config(origin)
    if first.add_memory:
        experiment = with_memories(experiment, str(named or first.base))
    chosen: Experiment = read_options(
        Experiment,
        arguments,
        program=f"{prog} {named or ''}".strip(),
        field_rule=_Offered(experiment.model, arguments),
        value_rule=_mixer,
        default=experiment,
        description=_DESCRIPTION.format(origin=origin),
    )
    if chosen.data == experiment.data or "model.vocab_size" in options:
        return chosen
    return _with_fitting_vocabulary(chosen, experiment.data)


def with_memories(experiment: Experiment, origin: str) -> Experiment:
    """A configuration with two memories in it, which alone are trained.

    FwPKM layers of 128 x 128 slots, written every 128 tokens, stand at one and two thirds of the
    depth. A closed gate leaves the model as it was.

    Args:
      experiment: of the run that the new one starts from, or a config.
      origin: its path or name, for messages.

    Raises:
      ValueError: it has memories.
    """
    model = experiment.model
    if model.memory_layers:
        raise ValueError(
            f"--add_memory: {origin} has memories in layers {model.memory_layers}; leave it out."
        )
    depth = len(model.mixers)
    memory = FastWeightConfig(rule=FwPKM(num_subkeys=128), chunk_size=128, gate_residual=True)
    layers = tuple(sorted({depth // 3, 2 * depth // 3}))
    return dataclasses.replace(
        experiment,
        model=dataclasses.replace(model, memory_layers=layers, fast_weight=memory),
        optimizer=dataclasses.replace(experiment.optimizer, train=(".*/memory/.*",)),
    )


def _with_fitting_vocabulary(experiment: Experiment, old: Any) -> Experiment:
    """The experiment with the vocabulary size of its data, if it had that of the `old` data."""
    needed = vocab_size(experiment.data)
    model = experiment.model
    if needed == model.vocab_size or model.vocab_size != vocab_size(old):
        return experiment
    return dataclasses.replace(experiment, model=dataclasses.replace(model, vocab_size=needed))


class _Offered:
    """Leaves out the options of sections that the model does not use.

    A section of a layer that the model does not have, or one that is None, is there if the command
    line names it: other options of it may add the layer.
    """

    def __init__(self, model: ModelConfig, arguments: Sequence[str]) -> None:
        self._unused = unused_sections(model)
        self._named = " ".join(arguments).replace("-", "_")

    def __call__(self, info: StructTypeInfo, field: StructFieldSpec) -> StructFieldSpec | None:
        if f".{field.name}." in self._named:
            section = _optional_section(field.type)
            if section is None or field.default is not None:
                return field
            return dataclasses.replace(field, type=section, default=tyro.MISSING_NONPROP)
        unused = self._unused if info.type is ModelConfig else ()
        if field.name in (*unused, *_IN_FILES.get(info.type, ())):
            return None
        return field


def unused_sections(model: ModelConfig) -> set[str]:
    """The model's sections that none of its layers reads."""
    used = _Reads(model)
    for mixer in model.mixers:
        if isinstance(mixer, str):
            mixer_config(mixer, used)
    layers = {"fast_weight": "memory_layers", "pkm": "pkm_layers", "experts": "expert_layers"}
    used.names |= {section for section, field in layers.items() if getattr(model, field)}
    fields = (field.name for field in dataclasses.fields(model))
    return {n for n in fields if dataclasses.is_dataclass(getattr(model, n))} - used.names


class _Reads:
    """Wraps a model's configuration and records which of its fields are read."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self.names = {"fast_weight_layer", "lora", "memory_mixer"}

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self._model, name)


def _optional_section(annotation: Any) -> Any:
    """The dataclass of a section that may be None; None for any other field."""
    options = typing.get_args(annotation)
    sections = [option for option in options if dataclasses.is_dataclass(option)]
    return sections[0] if types.NoneType in options and len(sections) == 1 else None


def _mixer(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Reads and writes a mixer as one argument: its name, or the JSON of its configuration."""
    kinds = typing.get_args(info.type)
    if AbstractMixerConfig not in kinds:
        return None
    named = str in kinds  # A layer's mixer; that of memories is a configuration or None.
    path = "model.mixers" if named else "model.memory_mixer"

    def read(arguments: list[str]) -> Any:
        (text,) = arguments
        if named and not text.startswith("{"):
            return text
        if not named and text == "None":
            return None
        try:
            return from_json(json.loads(text), Mixer, path=path)
        except ValueError as error:  # tyro would not print its message.
            raise TypeError(f"{path}={text!r}: {error}") from error

    def write(mixer: Any) -> list[str]:
        plain = mixer is None or isinstance(mixer, str)
        return [str(mixer) if plain else json.dumps(to_json(mixer))]

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join((*(mixer_names() if named else ('None',)), 'JSON'))}}}",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, kinds),
        str_from_instance=write,
    )
