"""`python -m fwpkm_jax` is the command `fwpkm`."""

import sys

from fwpkm_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
