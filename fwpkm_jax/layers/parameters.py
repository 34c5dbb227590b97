"""What a parameter is, said where it is made: its role, its dimensions, whether it decays.

A `Declaration` travels with the parameter as metadata of its Flax variable, through `nnx.split`,
gradients and the optimiser. Weight decay, the layout over a mesh, low-rank updates and the choice
of what trains read it; none of them looks at a parameter's name or number of dimensions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from flax import nnx

from fwpkm_jax.core.checks import check_rngs
from fwpkm_jax.literals import Checked

LogicalAxes = tuple[str | None, ...]
"""What a parameter's dimensions are: "vocab", "embed" (the model's width), "heads" (all heads' or
groups of heads' features, one head after the other), "mlp" (hidden units), "experts", "slots" and
"columns" of a learned value table; None: not one of these. `models.sharding.mesh_axes` says which
are split."""

Role = Literal[
    "matrix",
    "embedding",
    "head",
    "convolution",
    "norm_scale",
    "scale",
    "bias",
    "gate",
    "statistic",
]
"""What a parameter does, in any number of dimensions:

| role | what it is | decays |
|---|---|---|
| `matrix` | a linear map, or one for each head or expert | yes |
| `embedding` | a vector for each token, slot or sub-key | yes |
| `head` | the linear map to the logits | yes |
| `convolution` | the taps of a convolution over tokens | yes |
| `norm_scale` | the factor behind a norm | no |
| `scale` | any other factor per head or channel | no |
| `bias` | what is added: biases and shifts | no |
| `gate` | a number that sets a rate, a decay or a gate of a head or channel | no |
| `statistic` | a running mean or variance; it has no gradient | no |
"""

MATRICES = frozenset[Role](("matrix", "embedding", "head", "convolution"))
"""Roles whose parameters decay by default, and that `ModelConfig.parameter_dtype` stores."""

_KEY = "declaration"


@dataclass(frozen=True, kw_only=True)
class Declaration(Checked):
    """What is known of a parameter apart from its value.

    Raises:
      ValueError: the role is unknown.
    """

    role: Role
    """What the parameter does."""
    axes: LogicalAxes | None = None
    """What each dimension is; None: the parameter is whole on every device."""
    decay: bool | None = None
    """Whether weight decay applies. None: as the role says."""

    @property
    def decays(self) -> bool:
        """Whether weight decay applies."""
        return self.role in MATRICES if self.decay is None else self.decay

    def axes_of(self, shape: Sequence[int], name: str = "a parameter") -> LogicalAxes:
        """One axis for each dimension of `shape`; `name` is for the error message.

        Raises:
          ValueError: as many dimensions as axes are declared, and the shape has another number.
        """
        if self.axes is None:
            return (None,) * len(shape)
        if len(self.axes) != len(shape):
            raise ValueError(
                f"{name} {list(shape)} is declared with the axes {self.axes}; give one for each "
                "dimension, or axes=None to keep it whole on every device."
            )
        return self.axes


def declare(
    role: Role, axes: LogicalAxes | None = None, *, decay: bool | None = None
) -> dict[str, Any]:
    """Metadata that says what a parameter is, for `kernel_metadata` and the like of Flax's layers.

    Args:
      role: what the parameter does, see `Role`.
      axes: what each dimension is, see `LogicalAxes`; None: whole on every device.
      decay: whether weight decay applies; None: as the role says.

    Raises:
      ValueError: the role is unknown.

    Example:
      >>> from flax import nnx
      >>> from fwpkm_jax.layers import declare
      >>> linear = nnx.Linear(
      ...     4, 8, kernel_metadata=declare("matrix", ("embed", "mlp")),
      ...     bias_metadata=declare("bias", ("mlp",)), rngs=nnx.Rngs(0),
      ... )
      >>> linear.kernel.declaration.decays, linear.bias.declaration.decays
      (True, False)
    """
    return {_KEY: Declaration(role=role, axes=axes, decay=decay)}


def declare_linear(inputs: str | None = None, outputs: str | None = None) -> dict[str, Any]:
    """Options of an `nnx.Linear` that declare its kernel and bias.

    A bias as wide as the model ("embed") is whole on every device.
    """
    bias = None if outputs == "embed" else outputs
    return {
        "kernel_metadata": declare("matrix", (inputs, outputs)),
        "bias_metadata": declare("bias", (bias,)),
    }


def linear_map(
    inputs: int,
    outputs: int,
    rows: str | None = "embed",
    columns: str | None = None,
    *,
    init_std: float,
    rngs: nnx.Rngs,
    **options: Any,
) -> nnx.Linear:
    """A linear map that says what it is; its kernel is normal, and it has no bias.

    Raises:
      ValueError: `rngs` gives no random keys.
    """
    check_rngs(rngs)
    init = nnx.initializers.normal(init_std)
    options = {"use_bias": False, "kernel_init": init, "rngs": rngs} | options
    return nnx.Linear(inputs, outputs, **options, **declare_linear(rows, columns))


def parameter(
    value: jax.Array, role: Role, axes: LogicalAxes | None = None, *, decay: bool | None = None
) -> nnx.Param:
    """A parameter that says what it is.

    Args:
      value: its initial value.
      role: what it does, see `Role`.
      axes: what each dimension is, see `LogicalAxes`; None: whole on every device.
      decay: whether weight decay applies; None: as the role says.

    Raises:
      ValueError: the role is unknown, or the number of axes is not that of the dimensions.

    Example:
      >>> import jax.numpy as jnp
      >>> from fwpkm_jax.layers import parameter
      >>> rates = parameter(jnp.zeros((8, 64)), "scale", ("heads", None))
      >>> rates.declaration.decays
      False
    """
    metadata = declare(role, axes, decay=decay)
    metadata[_KEY].axes_of(value.shape)
    return nnx.Param(value, **metadata)


def declaration_of(variable: Any) -> Declaration | None:
    """What a variable says about itself; None: nothing, or it is no Flax variable."""
    if not isinstance(variable, nnx.Variable):
        return None
    return variable.get_metadata(_KEY, None)


def is_variable(x: Any) -> bool:
    """Whether a node of a tree is a Flax variable, for `is_leaf`."""
    return isinstance(x, nnx.Variable)
