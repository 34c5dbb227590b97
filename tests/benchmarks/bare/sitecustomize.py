"""Makes a process, and those it starts, as poor as a bare GPU machine.

Python imports this when the folder is on PYTHONPATH. jax, flax, optax, orbax, chex, numpy and
pytest can be imported; the library's other dependencies only from folders that PYTHONPATH names,
where wheels were unpacked.
"""

import os
import sys
from importlib.machinery import PathFinder

ABSENT = {
    *("tyro", "beartype", "grain", "tensorboardX", "matplotlib", "sentencepiece", "safetensors"),
    *("hypothesis", "xdist", "mistral_common", "pyarrow", "importlinter"),
    *("jaxtyping", "wadler_lindig"),
}


class _Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ABSENT:
            return None
        if name == top:
            path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        found = PathFinder.find_spec(name, path, target)
        if found is None:
            raise ModuleNotFoundError(f"No module named {top!r}", name=name)
        return found


sys.meta_path.insert(0, _Absent)
