"""The experiment that a command line of `fwpkm train` asks for."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from fwpkm_jax.cli.help_text import without_unused_sections
from fwpkm_jax.cli.options import values_of
from fwpkm_jax.command_line import check_options, separate_options
from fwpkm_jax.config import Experiment, load_config, read_experiment
from fwpkm_jax.config_json import from_json, to_json
from fwpkm_jax.data import vocab_size
from fwpkm_jax.layers.mixers.registry import check_mixer_name, mixer_names
from fwpkm_jax.models.config import Mixer
from fwpkm_jax.plugins import import_plugins
from fwpkm_jax.run.train import resume_experiment
from fwpkm_jax.typed_options import read_options
from fwpkm_jax.whole_files import check_local

_DESCRIPTION = (
    "Trains {origin}; the defaults shown are its own. In place of its name, give that of another "
    "shipped config, the path of a .py file, or --resume RUN to continue a run with the run's own "
    "configuration."
)


def parse_command_line(
    arguments: Sequence[str], *, default: str | Path, prog: str = "fwpkm train"
) -> Experiment:
    """The experiment that a command line asks for.

    `[CONFIG] [--section.field VALUE ...]` starts from a config. `--resume RUN [...]` starts from
    the configuration of a run; training then continues that run. `--base RUN --run_dir NEW [...]`
    also starts from the configuration of a run; a new run then starts from its weights.

    Args:
      arguments: the command line without the program's name.
      default: name or path of the config that is used if the command line names none.
      prog: the program's name in `--help`.

    Raises:
      SystemExit: 0 after `--help`.
      ValueError: an option does not exist (the nearest name is given), a value is of a wrong type
        or refused, or a plugin is not installed; see also `load_config`.
      FileNotFoundError: there is no such config or run.
    """
    arguments = separate_options(arguments)
    option = ""
    for value in arguments:
        option = value if value.startswith("--") else option
        # Sources of text and runs may have addresses.
        if not option.startswith("--data.") and option not in ("--run_dir", "--resume", "--base"):
            check_local(value, option.removeprefix("--"))
    import_plugins(values_of("--plugins", arguments))
    if "--resume" in arguments:
        origin, experiment, arguments = _resumed(arguments)
    elif "--base" in arguments and (not arguments or arguments[0].startswith("-")):
        origin, experiment = _based(arguments)
    else:
        origin = str(default)
        if arguments and not arguments[0].startswith("-"):
            origin = arguments.pop(0)
        experiment = load_config(origin)
    arguments = ["--help" if argument == "-h" else argument for argument in arguments]
    shown = contextlib.nullcontext()
    if "--help_all" in arguments:
        arguments = ["--help"]
    elif "--help" in arguments:
        shown = without_unused_sections(experiment)
    check_options(arguments, experiment)
    default_data, given = experiment.data, arguments
    experiment, arguments = _fill_optional_sections(experiment, arguments, prog=prog)
    try:
        with shown:
            experiment = read_options(
                Experiment,
                arguments,
                program=f"{prog} {origin}",
                like=experiment,
                default=experiment,
                description=_DESCRIPTION.format(origin=origin),
                config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
                registry=_MIXERS,
            )
    except _MixerError as error:
        raise ValueError(f"model.{error}") from error
    if experiment.data == default_data or "--model.vocab_size" in given:
        return experiment
    return _with_fitting_vocabulary(experiment, default_data)


def _with_fitting_vocabulary(experiment: Experiment, old: Any) -> Experiment:
    """The experiment with the vocabulary size of its data, if it had that of the `old` data."""
    needed = vocab_size(experiment.data)
    model = experiment.model
    if needed == model.vocab_size or model.vocab_size != vocab_size(old):
        return experiment
    return dataclasses.replace(experiment, model=dataclasses.replace(model, vocab_size=needed))


class _MixerError(Exception):
    """What is wrong with a mixer; tyro would keep a ValueError to itself."""


_MIXERS = tyro.constructors.ConstructorRegistry()


@_MIXERS.primitive_rule
def _mixer(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    """Reads and writes a mixer as one argument: its name, or the JSON of its configuration."""
    if set(typing.get_args(info.type)) != set(typing.get_args(Mixer)):
        return None

    def read(arguments: list[str]) -> Any:
        (text,) = arguments
        try:
            if text.startswith("{"):
                return from_json(json.loads(text), Mixer, path="mixers")
            check_mixer_name(text, "mixers")
        except json.JSONDecodeError as error:
            raise _MixerError(f"mixers={text!r} is no JSON: {error}.") from error
        except ValueError as error:
            raise _MixerError(str(error)) from error
        return text

    def write(mixer: Any) -> list[str]:
        return [mixer if isinstance(mixer, str) else json.dumps(to_json(mixer))]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join((*mixer_names(), 'JSON'))}}}",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, typing.get_args(Mixer)),
        str_from_instance=write,
    )


def _without(option: str, arguments: list[str]) -> list[str]:
    """The arguments without an option that takes several values."""
    if option not in arguments:
        return arguments
    at = arguments.index(option)
    return arguments[:at] + arguments[at + 1 + len(values_of(option, arguments)) :]


def _resumed(arguments: list[str]) -> tuple[str, Experiment, list[str]]:
    """A label for `--help`, the configuration of the run after `--resume`, other arguments."""
    at = arguments.index("--resume")
    value = arguments[at + 1 : at + 2]
    if not value or value[0].startswith("-"):
        raise ValueError("--resume names no run directory; write --resume RUN.")
    # Plugins are imported by now; those of the run stay as they are.
    others = _without("--plugins", arguments[:at] + arguments[at + 2 :])
    if others and not others[0].startswith("-"):
        raise ValueError(
            f"--resume {value[0]} continues with the run's own configuration; "
            f"leave out {others[0]}."
        )
    if "--run_dir" in others:
        raise ValueError(f"--resume {value[0]} continues in that directory; leave out --run_dir.")
    return f"--resume {value[0]}", resume_experiment(value[0]), others


def _based(arguments: list[str]) -> tuple[str, Experiment]:
    """A label for `--help`, and the configuration of the run after `--base`, for a new run."""
    value = arguments[arguments.index("--base") + 1 :][:1]
    if not value or value[0].startswith("-"):
        raise ValueError("--base names no run directory; write --base RUN.")
    if "--run_dir" not in arguments and "--help" not in arguments:
        raise ValueError(f"--base {value[0]} starts a new run; name its --run_dir.")
    return f"--base {value[0]}", dataclasses.replace(read_experiment(value[0]), base=value[0])


def _fill_optional_sections(
    config: Any, arguments: list[str], *, prog: str, prefix: str = "--"
) -> tuple[Any, list[str]]:
    """Creates sections that are None in the config and named on the command line.

    tyro accepts the fields of a section only if the default has that section. This function
    therefore reads options such as `--model.x.yarn.factor 4` for a config whose `yarn` is None.
    `--model.x.yarn None` removes a section.

    Returns:
      The configuration with those sections changed, and the remaining arguments.
    """
    changes = {}
    hints = typing.get_type_hints(type(config))
    for name in (f.name for f in dataclasses.fields(config)):
        value, flag = getattr(config, name), f"{prefix}{name}"
        options = typing.get_args(hints[name])
        sections = [o for o in options if dataclasses.is_dataclass(o)]
        optional = types.NoneType in options and len(sections) == 1
        if optional and flag in arguments:
            at = arguments.index(flag)
            if arguments[at + 1 : at + 2] == ["None"]:
                changes[name] = None
                arguments = arguments[:at] + arguments[at + 2 :]
                continue
        if optional and value is None:
            mine, arguments = _take(arguments, f"{flag}.")
            if mine:
                cls: Any = sections[0]
                changes[name] = read_options(
                    cls,
                    mine,
                    program=f"{prog} {flag}",
                    section=flag.removeprefix("--"),
                    config=(tyro.conf.FlagConversionOff,),
                )
        elif dataclasses.is_dataclass(value):
            section, arguments = _fill_optional_sections(
                value, arguments, prog=prog, prefix=f"{flag}."
            )
            if section is not value:
                changes[name] = section
    return (dataclasses.replace(config, **changes) if changes else config), arguments


def _take(arguments: list[str], prefix: str) -> tuple[list[str], list[str]]:
    """The options that start with `prefix`, which is removed, and all other arguments."""
    mine, others, taking = [], [], False
    for argument in arguments:
        if argument.startswith("--"):
            taking = argument.startswith(prefix)
            if taking:
                mine.append("--" + argument.removeprefix(prefix))
                continue
        (mine if taking else others).append(argument)
    return mine, others
