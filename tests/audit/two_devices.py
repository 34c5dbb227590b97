"""Prints the verdict of every path of a tiny model on two simulated devices, as JSON."""

import json

from fwpkm_jax.audit.model_paths import model_lines
from tests.audit.conftest import make_subject

if __name__ == "__main__":
    print(
        json.dumps(
            {f"{one.section}, {one.name}": one.verdict for one in model_lines(make_subject())}
        )
    )
