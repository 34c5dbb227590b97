"""The command `fwpkm`: a file for each subcommand."""

from fwpkm_jax.cli.program import main

__all__ = ["main"]
