"""`fwpkm generate` of this checkout: `python generate.py ...`."""

import sys

from fwpkm_jax.cli.program import run

if __name__ == "__main__":
    sys.exit(run("generate", sys.argv[1:], program="generate.py"))
