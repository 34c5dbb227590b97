"""`fwpkm generate` of this checkout: `python generate.py ...`."""

import sys

from fwpkm_jax.cli.generate_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="generate.py"))
