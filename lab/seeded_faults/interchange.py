"""Faults in `fwpkm_jax.interchange`."""

from lab.seeded_faults.fault import Fault

_OUTSIDE = ("tests/interchange/test_outside_weights.py",)
_WEIGHTS = ("tests/interchange/test_weights.py", "tests/golden/test_lm.py")

FAULTS = (
    Fault(
        "release: convolutions not transposed",
        'return tensor[:, 0].T if layout == "convolution" else tensor.reshape(shape)',
        'return tensor[:, 0].reshape(shape) if layout == "convolution" else tensor.reshape(shape)',
        _WEIGHTS,
    ),
    Fault(
        "release: the head not transposed",
        'names["params/head"] = ReleaseTensor("lm_head.weight", "transposed")',
        'names["params/head"] = ReleaseTensor("lm_head.weight", "rows")',
        _WEIGHTS,
    ),
    Fault(
        "release: a tied head that differs is dropped",
        "if not same or (embedding is not None and not np.array_equal(head, embedding)):",
        "if not same:",
        _WEIGHTS,
    ),
    Fault(
        "release: several memories are written as one",
        "            if array.shape[0] != 1:\n",
        "            if array.shape[0] < 1:\n",
        _WEIGHTS,
    ),
    Fault(
        "weights: a tensor of another shape is taken",
        "if tuple(found) != tuple(shape):",
        "if len(found) != len(shape):",
        _WEIGHTS,
    ),
    Fault(
        "weights: numbers that are not finite are taken",
        "        check_finite(name, tensor, where)\n    return tensor\n",
        "        del where\n    return tensor\n",
        _OUTSIDE,
    ),
    Fault(
        "hf: the index goes before the single file",
        "        if path.is_file():\n            super().__init__(Safe",
        "        if path.is_file() and file:\n            super().__init__(Safe",
        _OUTSIDE,
    ),
    Fault(
        "safetensors: tensors may overlap",
        "            if tensor.start != end:\n",
        "            if tensor.start > end:\n",
        _OUTSIDE,
    ),
    Fault(
        "config.json: any number of layers",
        'number = self.count("num_hidden_layers", most=_MOST_LAYERS)',
        'number = self.count("num_hidden_layers", most=2**40)',
        _OUTSIDE,
    ),
)
