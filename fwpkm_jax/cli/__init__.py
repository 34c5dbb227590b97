"""The command `fwpkm`; each subcommand has its own file."""

from fwpkm_jax.cli.program import main

__all__ = ["main"]
