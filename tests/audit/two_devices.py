"""Prints the verdict of every path of a tiny model on two simulated devices, as JSON."""

import json

from fwpkm_jax.audit.model_paths import model_causality
from tests.audit.conftest import make_subject

if __name__ == "__main__":
    print(json.dumps({line.name: line.verdict for line in model_causality(make_subject())}))
