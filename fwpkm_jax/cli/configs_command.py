"""`fwpkm configs`: lists the shipped configs, with the first line of each file."""

import ast
import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from fwpkm_jax.cli.options import parse_options
from fwpkm_jax.config import load_config, shipped_configs
from fwpkm_jax.data.streams.names import PACKAGED
from fwpkm_jax.literals import some


@dataclass(frozen=True, kw_only=True)
class ConfigsOptions:
    """Lists the configs that `fwpkm train` knows by name."""


def main(arguments: Sequence[str], program: str = "fwpkm configs") -> int:
    """Prints the names; returns the program's exit code."""
    parse_options(ConfigsOptions, arguments, program)
    by_file = sorted(shipped_configs().items(), key=lambda item: (item[1], item[0]))
    for path, group in itertools.groupby(by_file, key=lambda item: item[1]):
        configs = [name for name, _ in group]
        about = ast.get_docstring(ast.parse(path.read_text())) or ""
        print(textwrap.fill("  ".join(configs), 80, break_on_hyphens=False))
        print(f"    {about.partition(chr(10))[0]}")
        text = load_config(configs[0]).data.text
        paths = () if text is None else (*text.train_paths, *text.valid_paths)
        if files := [path for path in paths if not path.startswith(PACKAGED)]:
            print(f"    Needs {some(files)};")
            print("    python -m fwpkm_jax.data.prepare SOURCE writes them (docs/howto/data.md).")
    return 0
