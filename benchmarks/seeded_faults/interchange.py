"""Faults in `fwpkm_jax.interchange`."""

from benchmarks.seeded_faults.fault import Fault

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
        'if not np.array_equal(head, tensors.get("model.embed_tokens.weight")):',
        "if head is None:",
        _WEIGHTS,
    ),
    Fault(
        "release: several memories are written as one",
        "            if array.shape[0] != 1:\n",
        "            if array.shape[0] < 1:\n",
        _WEIGHTS,
    ),
    Fault(
        "torch files: offsets of views ignored",
        "storage[offset:], shape, [s * storage.itemsize for s in strides], writeable=False",
        "storage[0:], shape, [s * storage.itemsize for s in strides], writeable=False",
        ("tests/interchange/test_torch_file.py",),
    ),
    Fault(
        "torch files: a tensor may end one number behind its storage",
        "if math.prod(shape) and reach >= storage.size:",
        "if math.prod(shape) and reach > storage.size:",
        ("tests/interchange/test_torch_file.py", "tests/faults/test_pickles.py"),
    ),
    Fault(
        "weights: a tensor of another shape is taken",
        "if tuple(tensor.shape) != tuple(shape):",
        "if tensor.size != math.prod(shape):",
        _WEIGHTS,
    ),
)
