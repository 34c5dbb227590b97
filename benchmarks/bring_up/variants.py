"""The variants of the training step that bring-up times: which kernels, which compiler's flags.

This is the one table of them. A new operation needs no line: `steps` finds every operation for
which the models choose a kernel, and those that `KNOWN` does not name get a variant without them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

KNOWN = (
    *("chunk_gated_delta_rule", "key_scan", "product_top_k"),
    *("value_scan", "slot_read", "slot_dot", "slot_add"),
)
"""Operations whose kernels' gain has been measured."""
CUBLAS = "--xla_gpu_enable_triton_gemm=false"
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
GRAPHS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE,"
    "DYNAMIC_SLICE_FUSION --xla_gpu_graph_min_graph_size=1"
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run the step."""

    name: str
    reference: tuple[str, ...] = ()
    """Operations that run as plain JAX."""
    flags: str = ""
    """Added to XLA_FLAGS."""
    carried: bool = False
    """Loads an executable that was made elsewhere, in place of tracing and compiling."""
    profiled: bool = False
    """Reports every kernel of a step, and whether equal steps give equal bits."""


def variants(operations: Sequence[str], *, carried: bool) -> list[Variant]:
    """The variants in the order in which their answers matter.

    Args:
      operations: those to leave out in turn.
      carried: whether there are executables made elsewhere.
    """
    new = tuple(operations)
    found = first_variants(carried=carried)
    if new:
        found.append(Variant(name="baseline", reference=new))
    if len(new) > 1:
        found += [Variant(name=f"without_{op}", reference=(op,)) for op in new]
    found.append(Variant(name="deterministic", flags=f"{CUBLAS} {DETERMINISTIC}", profiled=True))
    # Command buffers brought no gain where they were timed.
    found.append(Variant(name="both", flags=f"{CUBLAS} {GRAPHS}"))
    found.append(Variant(name="graphs", flags=GRAPHS))
    return found


def first_variants(*, carried: bool) -> list[Variant]:
    """The variants that come first whichever operations are new."""
    found = [Variant(name="carried", carried=True, profiled=True)] if carried else []
    return [*found, Variant(name="all", profiled=True), Variant(name="flags", flags=CUBLAS)]
