"""`fwpkm eval` of this checkout: `python eval.py ...`."""

import sys

from fwpkm_jax.cli.program import run

if __name__ == "__main__":
    sys.exit(run("eval", sys.argv[1:], program="eval.py"))
