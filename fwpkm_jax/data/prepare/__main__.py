"""`python -m fwpkm_jax.data.prepare`."""

import sys

from fwpkm_jax.data.prepare.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
