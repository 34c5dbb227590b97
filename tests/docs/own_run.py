"""Runs a command of `fwpkm` with a stand-in for wandb; prints what was logged and what is stored.

python -m tests.docs.own_run memory://bucket train CONFIG ...
"""

import json
import sys

from fwpkm_jax.cli import main
from fwpkm_jax.storage.stores import Store
from tests.training.runs.test_metrics import FakeWandb

if __name__ == "__main__":
    wandb = FakeWandb()
    sys.modules["wandb"] = wandb
    place, *command = sys.argv[1:]
    code = main(command)
    steps = [step for step, _ in wandb.logged]
    print(json.dumps({"code": code, "steps": steps, "stored": sorted(Store(place).sizes())}))
