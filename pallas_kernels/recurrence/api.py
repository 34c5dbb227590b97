"""The recurrence of matrix memories, for which other packages have kernels."""

from jaxtyping import Array, Bool, Float

from fwpkm_jax.core.recurrence.linear_recurrence import RecurrenceOutput, chunk_recurrence
from pallas_kernels.dispatch import AnyBackend, Operation
from pallas_kernels.recurrence import libraries


def linear_recurrence(
    query: Float[Array, "batch length heads key"],
    key: Float[Array, "batch writes heads key"],
    value: Float[Array, "batch writes heads value"],
    *,
    log_decay: Float[Array, "batch length heads"] | Float[Array, "batch length heads key"] | None,
    beta: Float[Array, "batch writes heads"] | None,
    initial_state: Float[Array, "batch heads key value"],
    starts: Bool[Array, "batch length"] | None = None,
    chunk_size: int = 64,
    backend: AnyBackend = "auto",
) -> RecurrenceOutput:
    """`core.recurrence.linear_recurrence.chunk_recurrence`, or kernels of another package.

    This package has no kernels for it; `gated_delta` has them for a decay per head with `beta`.
    The package jax-linear-attention (`backend="jla"`) has some for Hopper GPUs, deltanet-tpu
    (`"deltanet_tpu"`) for TPUs. They are used by request only. Both take one write per token. The
    first rounds queries, keys and values to bfloat16.

    Args:
      query: what to read with; it is not scaled.
      key: where to write; `key` and `value` are 64 or 128 for jla, 128 for deltanet_tpu.
      value: what to write.
      log_decay: of a head, or of each key channel; None: everything is kept.
      beta: strength of delta steps; None: writes add.
      initial_state: memory before the first token.
      starts: true at tokens before which the memory is set to 0; None: nowhere.
      chunk_size: writes per chunk of plain JAX.
      backend: "auto" and "reference" are plain JAX; "jla" and "deltanet_tpu" the other packages.

    Raises:
      ModuleNotFoundError: the package is not installed.
      NotImplementedError: it does not take these arrays, or not on this device.
      RuntimeError: its kernels disagree with plain JAX on this device.
    """
    arrays = query, key, value, log_decay, beta, initial_state
    chosen = RECURRENCE.choose(backend, *arrays)
    if chosen == "reference":
        how = {"initial_state": initial_state, "starts": starts, "chunk_size": chunk_size}
        return chunk_recurrence(query, key, value, log_decay=log_decay, beta=beta, **how)
    return libraries.run(chosen, *arrays, starts, scale=1.0)


RECURRENCE = Operation(
    "linear_recurrence",
    libraries.refuses,
    kernels=(),
    check="pallas_kernels.recurrence.specs:COMPARISON.check",
    libraries=("jla", "deltanet_tpu"),
)
