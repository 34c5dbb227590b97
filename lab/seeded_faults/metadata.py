"""Faults in what a parameter says about itself, and in who reads it: roles, decay, sharding."""

from lab.seeded_faults.fault import Fault

_DECAY = ("tests/training/test_optimizer.py",)
_LAYOUT = ("tests/training/test_sharding.py",)
_ROLES = ("tests/training/test_roles.py",)

FAULTS = (
    Fault(
        "metadata: a parameter's own choice of decay is ignored",
        "return self.role in MATRICES if self.decay is None else self.decay",
        "return self.role in MATRICES",
        _DECAY,
    ),
    Fault(
        "metadata: embeddings do not decay",
        'frozenset[Role](("matrix", "embedding", "head", "convolution"))',
        'frozenset[Role](("matrix", "head", "convolution"))',
        _DECAY,
    ),
    Fault(
        "metadata: convolutions do not decay",
        'frozenset[Role](("matrix", "embedding", "head", "convolution"))',
        'frozenset[Role](("matrix", "embedding", "head"))',
        _ROLES,
    ),
    Fault(
        "metadata: a silent parameter is a matrix",
        "name, declaration = path_name(path), declaration_of(leaf)",
        "name, declaration = path_name(path), declaration_of(leaf) or Declaration(role='matrix')",
        (*_DECAY, *_LAYOUT),
    ),
    Fault(
        "metadata: more dimensions than axes are taken",
        "if len(self.axes) != len(shape):",
        "if len(self.axes) > len(shape):",
        _ROLES,
    ),
    Fault(
        "metadata: an outside mixer need not say what its parameters are",
        "        if declared is None:\n            raise AssertionError(",
        "        if declared is None:\n            continue\n            raise AssertionError(",
        ("tests/testing/test_mixers.py",),
    ),
    Fault(
        "metadata: a bias as wide as the model is split",
        'bias = None if outputs == "embed" else outputs',
        "bias = outputs",
        (*_ROLES, *_LAYOUT),
    ),
    Fault(
        "metadata: a linear map's rows and columns are swapped",
        'declare("matrix", (inputs, outputs))',
        'declare("matrix", (outputs, inputs))',
        (*_ROLES, *_LAYOUT),
    ),
    Fault(
        "metadata: the model's width is whole on every device",
        '        "embed": ("fsdp",),\n',
        "",
        _LAYOUT,
    ),
    Fault(
        "metadata: a role's name need only begin a role",
        "if re.fullmatch(pattern[len(ROLE) :], role)]",
        "if re.match(pattern[len(ROLE) :], role)]",
        _ROLES,
    ),
    Fault(
        "metadata: roles that train are looked for in paths",
        "if not pattern.startswith(ROLE):",
        "if not pattern.endswith(ROLE):",
        _ROLES,
    ),
    Fault(
        "metadata: a low-rank factor is laid out as the other one",
        'self.lora_a = parameter(a, "matrix", (rows, None))',
        'self.lora_a = parameter(a, "matrix", (None, rows))',
        (*_ROLES, "tests/layers/test_lora.py"),
    ),
    Fault(
        "metadata: titans' norm scale decays",
        'parameter(start.scale, "norm_scale")',
        'parameter(start.scale, "matrix")',
        _DECAY,
    ),
    Fault(
        "metadata: a decay rate is a matrix",
        'self.A_log = parameter(jnp.log(16 * uniform), "gate", ("heads",))',
        'self.A_log = parameter(jnp.log(16 * uniform), "matrix", ("heads",))',
        (*_DECAY, *_ROLES),
    ),
    Fault(
        "metadata: running statistics decay",
        'nnx.BatchStat(value, **declare("statistic"))',
        'nnx.BatchStat(value, **declare("matrix"))',
        (*_DECAY, *_ROLES),
    ),
)
