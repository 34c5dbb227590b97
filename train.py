"""`fwpkm train` of this checkout: `python train.py ...`."""

import sys

from fwpkm_jax.cli.train_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="train.py"))
