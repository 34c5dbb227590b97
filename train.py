"""`fwpkm train` of this checkout: `python train.py ...`."""

import sys

from fwpkm_jax.cli.program import run

if __name__ == "__main__":
    sys.exit(run("train", sys.argv[1:], program="train.py"))
