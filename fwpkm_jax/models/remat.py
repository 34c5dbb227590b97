"""Rematerialisation: what the backward pass of a layer finds again, computes again or fetches."""

from typing import Any, Literal

import jax

from fwpkm_jax.layers.mlp import HIDDEN

Remat = Literal["block", "names", "dots", "offload"]
"""Which activations of each layer's token mixer and MLP, PKM or experts the backward pass computes
again, from least memory on the device to most:

| name | kept on the device | in the host's memory | computed again |
|---|---|---|---|
| `offload` | nothing | the layer's input, the mixer's output, the MLP's products | as `names` |
| `block` | the layer's input | | all |
| `names` | input, the mixer's output, the MLP's products | | the mixer, norms, elementwise |
| `dots` | input, results of linear maps | | attention, recurrences, elementwise |

None: all activations are kept. The fast-weight memory is never computed again, because that would
need a copy of its table from before the write. Results change only by rounding."""

INPUT, MIXED = "layer_input", "mixed"
"""Names of the residual stream before a layer's token mixer, and of the mixer's output."""
_NAMES = (INPUT, MIXED, HIDDEN)


POLICIES: dict[Remat, Any] = {
    "block": None,
    "names": jax.checkpoint_policies.save_only_these_names(*_NAMES),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(_NAMES),
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def check_offload(remat: Remat | None, device: Any) -> None:
    """Raises ValueError if activations are to go to the host and the device has no other memory.

    XLA for CPUs compiles such a program, and moves nothing.
    """
    if remat != "offload":
        return
    kinds = {memory.kind for memory in device.addressable_memories()}
    if device.platform == "cpu" or "pinned_host" not in kinds:
        raise ValueError(
            f"training.remat=offload moves activations to the memory of the host, and "
            f"{device.device_kind} has no memory of its own; use training.remat=names, which keeps "
            "the same ones, or block."
        )
