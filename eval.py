"""`fwpkm eval` of this checkout: `python eval.py ...`."""

import sys

from fwpkm_jax.cli.eval_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="eval.py"))
