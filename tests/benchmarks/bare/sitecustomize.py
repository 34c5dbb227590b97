"""Makes a process, and those it starts, as poor as a bare GPU machine.

Python imports this when the folder is on PYTHONPATH. jax, flax, optax, orbax, chex, numpy, pytest
and jaxtyping can be imported; the library's other dependencies cannot.
"""

import sys

ABSENT = {
    *("tyro", "beartype", "grain", "tensorboardX", "matplotlib", "sentencepiece", "safetensors"),
    *("hypothesis", "xdist", "mistral_common", "pyarrow", "importlinter"),
}


class _Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


sys.meta_path.insert(0, _Absent)
