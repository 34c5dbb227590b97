"""Memories, and what stands around them, as pure functions with the argument names of the field.

Each takes arrays and returns arrays, has gradients with respect to every floating array, and may be
jitted, batched and scanned over. A row may hold several documents: `segment_ids`
`[batch, length]` name the document of each token. A document is a run of equal ids, and 0 is
padding, which changes no state. `initial_state` and the final state carry a memory from call to
call: the first document of a row goes on with the state that is given.
Kernels run where the device has them.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fwpkm_jax.core import cross_entropy
from fwpkm_jax.core.checks import check_arrays
from fwpkm_jax.core.documents import (
    Documents,
    document_numbers,
    document_starts,
    starts_at_real,
)
from fwpkm_jax.core.recurrence.gated_delta import GatedDeltaOutput
from fwpkm_jax.core.recurrence.linear_recurrence import RecurrenceOutput
from fwpkm_jax.core.sequence.convolution import convolution_inputs
from fwpkm_jax.core.slots.delta import chunks as delta_chunks
from fwpkm_jax.core.slots.delta.definition import Decay, DeltaOutput, DeltaTokens
from fwpkm_jax.core.slots.delta.documents import sparse_delta_in_documents
from fwpkm_jax.core.slots.keys.addressing import Normalization, Score
from fwpkm_jax.layers.memories.documents import within_documents
from fwpkm_jax.literals import nearest
from fwpkm_jax.rules.fwpkm import FwPKM, FwPKMMemory
from fwpkm_jax.rules.matrix import MATRIX_RULES, AbstractMatrixRule, Tokens
from fwpkm_jax.rules.matrix.gated_deltanet import GatedDeltaNet
from pallas_kernels import short_convolution as convolution
from pallas_kernels.cross_entropy import row_cross_entropy
from pallas_kernels.dispatch import LIBRARIES, AnyBackend, Backend, Library, default_backend
from pallas_kernels.gated_delta import chunk_gated_delta_rule
from pallas_kernels.product_top_k import select_slots
from pallas_kernels.row_ops import chosen_sums
from pallas_kernels.slot_read import slot_read

SegmentIds = Int[Array, "batch length"]


def gated_delta_rule(
    q: Float[Array, "batch length heads key"],
    k: Float[Array, "batch length heads key"],
    v: Float[Array, "batch length heads value"],
    g: Float[Array, "batch length heads"],
    beta: Float[Array, "batch length heads"],
    *,
    initial_state: Float[Array, "batch heads key value"] | None = None,
    segment_ids: SegmentIds | None = None,
    scale: float | None = None,
    backend: AnyBackend = "auto",
) -> GatedDeltaOutput:
    """What the queries read from a memory that decays and then writes each token's error.

        S = exp(g) S;  S = S + k beta (v - S^T k)^T;  output = scale S^T q

    Args:
      q: queries.
      k: keys, of at most unit length, or the memory may grow without bound.
      v: values.
      g: log of the share of the memory that is kept, at most 0.
      beta: write strength.
      initial_state: the memory before the first token; None: empty.
      segment_ids: documents, each of which starts from an empty memory; None: a row is one.
      scale: factor on the queries; None: `key ** -0.5`.
      backend: "auto", "reference" or "pallas", see `pallas_kernels.dispatch`; or the kernels of
        another package, "jla" or "deltanet_tpu", see `pallas_kernels.recurrence`.

    Returns:
      `output` `[batch, length, heads, value]` and `final_state` `[batch, heads, key, value]` after
      the last token that is no padding, at least float32.

    Raises:
      ValueError: an array does not fit the others; the message names it.
      ModuleNotFoundError: a package named as `backend` is not installed.
      NotImplementedError: kernels asked for by name do not take these arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> from fwpkm_jax.functions import gated_delta_rule
      >>> q = k = v = jnp.eye(4)[None, :, None]  # Four tokens of one head, each its own key.
      >>> gates = jnp.ones((1, 4, 1))
      >>> out = gated_delta_rule(q, k, v, 0 * gates, gates, scale=1.0)
      >>> bool(jnp.allclose(out.final_state[0, 0], jnp.eye(4), atol=1e-6))
      True

    References: Yang et al. 2024, arXiv:2412.06464.
    """
    check_arrays(
        q=(q, "float batch length heads key"),
        k=(k, "float batch length heads key"),
        v=(v, "float batch length heads value"),
        g=(g, "float batch length heads"),
        beta=(beta, "float batch length heads"),
        initial_state=(initial_state, "float batch heads key value"),
        segment_ids=(segment_ids, "int batch length"),
    )
    starts = None
    if segment_ids is not None:
        starts, real = _documents(segment_ids, initial_state)
        g, beta = (jnp.where(real[:, :, None], x, 0) for x in (g, beta))
    how: dict[str, Any] = {"initial_state": initial_state, "starts": starts, "scale": scale}
    return chunk_gated_delta_rule(q, k, v, log_decay=g, beta=beta, backend=backend, **how)


def matrix_memory(
    rule: str | AbstractMatrixRule,
    q: Float[Array, "batch length heads key"],
    k: Float[Array, "batch writes heads key"],
    v: Float[Array, "batch writes heads value"],
    *,
    g: Array | None = None,
    beta: Array | None = None,
    initial_state: Any = None,
    segment_ids: SegmentIds | None = None,
    backend: Literal["auto", "reference"] | Library = "auto",
) -> RecurrenceOutput:
    """What the queries read from a matrix memory of any rule.

    Args:
      rule: a name in `fwpkm_jax.rules.matrix.MATRIX_RULES`, such as "kda", "gla" or "rwkv7", or an
        instance of a rule with options. Its docstring says what its gates mean.
      q: queries; they are not scaled.
      k: keys as the rule takes them, without a feature map; for a rule with several writes per
        token, all writes one after the other.
      v: values, as keys.
      g: log decay, the rule's `log_decay`: `[batch, length, heads]`, or `[..., heads, key]` for a
        rule that decays by channel; None for a rule without.
      beta: write strength, the rule's `strength`: `[batch, writes, heads]`, or with `key` or
        `value` behind; None for a rule without.
      initial_state: `final_state` of an earlier call; None: empty.
      segment_ids: documents, each of which starts from an empty memory; None: a row is one.
      backend: "auto" and "reference", plain JAX but for the kernels of "gated_deltanet"; or the
        kernels of another package, "jla" or "deltanet_tpu", see `pallas_kernels.recurrence`.

    Returns:
      `output` `[batch, length, heads, value]` and `final_state` after the last token that is no
      padding, at least float32.

    Raises:
      ValueError: the rule is unknown, takes other gates than are given, or an array does not fit.
      ModuleNotFoundError: a package named as `backend` is not installed.
      NotImplementedError: it has no kernels for the rule, or they do not take these arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> from fwpkm_jax.functions import matrix_memory
      >>> q = k = v = jnp.eye(4)[None, :, None]
      >>> gates = jnp.ones((1, 4, 1))
      >>> out = matrix_memory("kda", q, k, v, g=jnp.zeros((1, 4, 1, 4)), beta=gates)
      >>> out.output.shape
      (1, 4, 1, 4)

    References: fwpkm_jax/rules/matrix has one file for each rule, with its source.
    """
    if isinstance(rule, str):
        if rule not in MATRIX_RULES:
            raise ValueError(f"rule={rule!r} is no matrix memory{nearest(rule, MATRIX_RULES)}.")
        rule = MATRIX_RULES[rule]()
    _check_memory_arguments(rule, q, k, v, g, beta, segment_ids)
    tokens, starts = Tokens(q, k, v, log_decay=g, strength=beta), None
    if segment_ids is not None:
        starts, real = _documents(segment_ids, initial_state)
        tokens = rule.skip(tokens, real)
    if backend == "auto":
        return rule.run(tokens, initial_state, starts)
    # Rules with a chunked form of their own would run it in plain JAX.
    shared = (AbstractMatrixRule.chunked, GatedDeltaNet.chunked)
    if backend in LIBRARIES and type(rule).chunked not in shared:
        raise NotImplementedError(
            f"{backend} has no kernels for {type(rule).__name__}; use 'auto'."
        )
    with default_backend(backend):
        return rule.run(tokens, initial_state, starts)


def _check_memory_arguments(rule: AbstractMatrixRule, q, k, v, g, beta, segment_ids) -> None:
    """Raises ValueError, in the names of `matrix_memory`, for what the rule does not take."""
    name = type(rule).__name__
    of_token, of_write = "float batch length heads", "float batch writes heads"
    decay = {"none": None, "head": of_token, "key": f"{of_token} key"}[rule.decay]
    strengths = {
        False: None,
        True: of_write,
        "key": f"{of_write} key",
        "value": f"{of_write} value",
    }
    strength = strengths[rule.strength]
    for gate, given, taken in (("g", g, decay), ("beta", beta, strength)):
        if given is None and taken is not None:
            axes = ", ".join(taken.split()[1:])
            raise ValueError(f"{name} needs {gate}, an array [{axes}]; pass {gate}=...")
        if given is not None and taken is None:
            raise ValueError(f"{name} has no {gate}; leave {gate}={given.dtype}{given.shape} out.")
    check_arrays(
        q=(q, f"{of_token} key"),
        k=(k, f"{of_write} key"),
        v=(v, f"{of_write} value"),
        g=(g, decay or ""),
        beta=(beta, strength or ""),
        segment_ids=(segment_ids, "int batch length"),
        # Axes of one name have one size; only rules of several writes have another number of them.
        sizes={"writes": rule.steps * q.shape[1]} if q.ndim == 4 else None,
    )


class Lookup(NamedTuple):
    """What queries found in a table.

    Attributes:
      output: `[..., value]`, the sum over heads.
      slot_ids: `[..., heads, top_k]`, best first.
      slot_weights: the weights of these reads.
    """

    output: Float[Array, "*tokens value"]
    slot_ids: Int[Array, "*tokens heads top_k"]
    slot_weights: Float[Array, "*tokens heads top_k"]


def product_key_lookup(
    q: Float[Array, "*tokens heads key"],
    keys: Float[Array, "heads 2 subkeys half"],
    values: Float[Array, "slots value"],
    *,
    top_k: int,
    score: Score = "dot",
    normalization: Normalization = "head",
    backend: Backend = "auto",
) -> Lookup:
    """Reads each query's best slots of `subkeys ** 2` without scoring them all (PKM).

    Tokens are read one by one, so that rows of several documents need no `segment_ids`.

    Args:
      q: queries, `key` twice `half`; the first half addresses rows. A single head has an axis of 1.
      keys: sub-keys, rows first.
      values: the table of `subkeys ** 2` rows; slot = row * subkeys + column. Ids are made here
        and never leave the table.
      top_k: slots that each head reads, at most `subkeys`.
      score: "dot", or "idw" for -log(1e-3 + squared distance).
      normalization: one softmax for each "head", or over all heads of a "token" (FwPKM).
      backend: "auto", "reference" or "pallas", see `pallas_kernels.dispatch`.

    Raises:
      ValueError: sizes do not fit each other.

    Example:
      >>> import jax.numpy as jnp
      >>> from fwpkm_jax.functions import product_key_lookup
      >>> keys = jnp.eye(2)[None, None].repeat(2, axis=1)  # One head, 2 x 2 slots.
      >>> found = product_key_lookup(jnp.array([[[0.0, 9, 9, 0]]]), keys, jnp.eye(4), top_k=1)
      >>> found.slot_ids.tolist()  # Row 1, column 0.
      [[[2]]]

    References: Lample et al. 2019, arXiv:1907.05242.
    """
    sizes = _check_table(keys, values)
    heads, key = sizes["heads"], 2 * sizes["half"]
    if q.ndim < 2 or q.shape[-2:] != (heads, key):
        hint = "; add the axis of heads, as q[..., None, :]" if heads == 1 else ""
        raise ValueError(f"q is {q.dtype}{list(q.shape)}; expected [..., {heads=}, {key=}]{hint}.")
    how: dict[str, Any] = {"score": score, "normalization": normalization, "backend": backend}
    address, weights = select_slots(q.reshape(-1, heads, key), keys, top_k=top_k, **how)
    ids, read_weights = (x.reshape(-1, heads * top_k) for x in (address.slot_ids, weights))
    read = slot_read(values, ids, read_weights, backend=backend)
    found = (read.output, address.slot_ids, weights)
    return Lookup(*(x.reshape(*q.shape[:-2], *x.shape[1:]) for x in found))


class FwPKMResult(NamedTuple):
    """What the queries of `fwpkm` read, and the memory after the last write."""

    output: Float[Array, "batch length value"]
    keys: Float[Array, "heads 2 subkeys half"]
    values: Float[Array, "slots value"]


def fwpkm(
    keys: Float[Array, "heads 2 subkeys half"],
    values: Float[Array, "slots value"],
    queries: Float[Array, "batch length heads key"],
    targets: Float[Array, "batch length value"],
    *,
    chunk_size: int = 512,
    top_k: int = 8,
    lookahead: int = 0,
    write_weight: Float[Array, "batch length"] | None = None,
    segment_ids: SegmentIds | None = None,
    score: Score = "idw",
) -> FwPKMResult:
    """Reads a table by product keys and rewrites the slots that each chunk has read (FwPKM).

    The memory goes in as `keys` and `values` and comes back. All sequences of a batch share it;
    `jax.vmap` over a leading axis gives each its own. `fwpkm_jax.FwPKM` has further options.

    Args:
      keys: sub-keys, rows first.
      values: the table of `subkeys ** 2` rows; slot = row * subkeys + column.
      queries: what each token reads and writes under.
      targets: what each token should have read. With `lookahead`, the values themselves: a token
        is paired with the value that many tokens later, in the same chunk and document.
      chunk_size: tokens of a sequence between two writes.
      top_k: slots that each head of a token reads.
      lookahead: distance from a token to its target.
      write_weight: weight of each token's error, such as a gate; None: 1.
      segment_ids: documents, which no pair crosses; padding writes nothing. Unlike the state of a
        matrix memory, this memory goes on from document to document, as in the paper.
      score: "idw" for -log(1e-3 + squared distance), or "dot".

    Raises:
      ValueError: sizes do not fit each other.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fwpkm_jax import FwPKM
      >>> from fwpkm_jax.functions import fwpkm
      >>> keys, values, _ = FwPKM(num_subkeys=8, key_dim=4, value_dim=6).init(jax.random.key(0))
      >>> queries = jax.random.normal(jax.random.key(1), (1, 4, 1, 4))
      >>> told = fwpkm(keys, values, queries, jnp.ones((1, 4, 6)), chunk_size=4)
      >>> told.output.shape, told.values.shape
      ((1, 4, 6), (64, 6))

    References: Zhao and Jones 2026, arXiv:2601.00671.
    """
    sizes = _check_table(keys, values)
    check_arrays(
        queries=(queries, "float batch length heads key"),
        targets=(targets, "float batch length value"),
        write_weight=(write_weight, "float batch length"),
        segment_ids=(segment_ids, "int batch length"),
        sizes={"heads": sizes["heads"], "key": 2 * sizes["half"], "value": sizes["value"]},
    )
    rule = FwPKM(
        num_subkeys=sizes["subkeys"],
        key_dim=2 * sizes["half"],
        value_dim=sizes["value"],
        num_heads=sizes["heads"],
        top_k=top_k,
        lookahead=lookahead,
        score=score,
    )
    mask = None if segment_ids is None else (segment_ids != 0).astype(jnp.float32)
    how: dict[str, Any] = {"gate": write_weight, "mask": mask, "chunk_size": chunk_size}
    sequence = rule.sequence(queries, targets, **how)
    if segment_ids is not None:
        sequence = within_documents(sequence, document_starts(segment_ids), lookahead=lookahead)
    out = rule.run(FwPKMMemory(keys, values), sequence, chunk_size=chunk_size)
    return FwPKMResult(out.output, out.memory.keys, out.memory.values)


def sparse_delta(
    table: Float[Array, "batch slots value"],
    write_ids: Int[Array, "batch length writes"],
    write_weights: Float[Array, "batch length writes"],
    read_ids: Int[Array, "batch length reads"],
    read_weights: Float[Array, "batch length reads"],
    v: Float[Array, "batch length value"],
    g: Float[Array, "batch length"],
    beta: Float[Array, "batch length"],
    *,
    decay: Decay = "slot",
    segment_ids: SegmentIds | None = None,
) -> DeltaOutput:
    """A table of slots of which each token writes a few by the gated delta rule, then reads a few.

        M[s] = exp(g) M[s];  r = sum of k[n] M[s[n]]
        M[s[n]] += k[n] beta (v - r);  y = sum of q[m] M[s[m]]

    Slots may occur more than once, within a token and among tokens; their weights then add up, and
    a slot decays once for each token that writes it. An id outside the table makes the row NaN.

    Args:
      table: M before the first token, a table for each row.
      write_ids: slots that each token writes.
      write_weights: k, of Euclidean norm at most 1, or the table may grow without bound.
      read_ids: slots that each token reads.
      read_weights: q.
      v: values.
      g: log of the share that the written slots keep, at most 0.
      beta: write strength.
      decay: "slot", or "weighted" for a decay of `exp(g k[n])`.
      segment_ids: documents; the first goes on with `table`, every other starts from a table of
        zeros; padding changes nothing. None: a row is one document.

    Returns:
      `table` after the last token, and `output` `[batch, length, value]`.

    Raises:
      ValueError: an array does not fit the others; the message names it.

    Example:
      >>> import jax.numpy as jnp
      >>> from fwpkm_jax.functions import sparse_delta
      >>> slot, one = jnp.array([[[5], [2], [5]]]), jnp.ones((1, 3, 1))
      >>> v, beta = jnp.array([[[1.0, 2], [3, 4], [5, 6]]]), jnp.ones((1, 3))
      >>> out = sparse_delta(jnp.zeros((1, 8, 2)), slot, one, slot, one, v, 0 * beta, beta)
      >>> out.output[0].tolist()  # Each token reads the slot that it has written.
      [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]

    References: Cabannes et al. 2026, arXiv:2607.07386.
    """
    check_arrays(
        table=(table, "float batch slots value"),
        write_ids=(write_ids, "int batch length writes"),
        write_weights=(write_weights, "float batch length writes"),
        read_ids=(read_ids, "int batch length reads"),
        read_weights=(read_weights, "float batch length reads"),
        v=(v, "float batch length value"),
        g=(g, "float batch length"),
        beta=(beta, "float batch length"),
        segment_ids=(segment_ids, "int batch length"),
    )
    starts = None
    if segment_ids is not None:
        starts, real = _documents(segment_ids, table)
        g, beta = (jnp.where(real, x, 0) for x in (g, beta))
    written = _inside(table, write_ids, write_weights)
    tokens = DeltaTokens(*written, *_inside(table, read_ids, read_weights), v, g, beta)
    sums = chosen_sums(table)
    if starts is None:
        return delta_chunks.sparse_delta(table, tokens, decay=decay, sums=sums)
    empty = jnp.zeros_like(table)
    return sparse_delta_in_documents(table, tokens, starts, fresh=empty, decay=decay, sums=sums)


def linear_cross_entropy(
    x: Float[Array, "*tokens model"],
    head: Float[Array, "model vocab"],
    labels: Int[Array, "*tokens"],
    *,
    bias: Float[Array, " vocab"] | None = None,
    weights: Float[Array, "*tokens"] | None = None,
    block: int = 1024,
    backend: Backend = "auto",
) -> Float[Array, ""]:
    """The mean cross-entropy in nats of the logits `x @ head + bias`, a block of tokens at a time.

    Logits and softmax are in at least float32; products take their operands in the dtype of `x`.

    Args:
      x: activations.
      head: the readout.
      labels: of each token. Those below 0, such as -100, are left out of the mean; one of `vocab`
        or more makes the loss NaN.
      bias: added to the logits.
      weights: of the labels in the mean, such as 0 for padding and for labels of other documents;
        None: 1.
      block: most tokens whose logits are in memory at once.
      backend: "auto", "reference" or "pallas", see `pallas_kernels.dispatch`.

    Raises:
      ValueError: sizes do not fit each other.

    Example:
      >>> import jax.numpy as jnp
      >>> from fwpkm_jax.functions import linear_cross_entropy
      >>> loss = linear_cross_entropy(jnp.zeros((2, 3)), jnp.ones((3, 8)), jnp.array([5, -100]))
      >>> round(float(loss), 4)  # log 8
      2.0794
    """
    vocab, tokens = head.shape[-1], x.shape[:-1]
    if labels.shape != tokens or (weights is not None and weights.shape != tokens):
        found = f"labels {list(labels.shape)}"
        found += "" if weights is None else f", weights {list(weights.shape)}"
        raise ValueError(f"{found}: expected {list(tokens)}, the axes of x without the last.")
    counted = labels >= 0
    weights = jnp.ones(tokens, jnp.float32) if weights is None else weights
    weights = jnp.where(counted, weights, 0).reshape(-1)
    total = cross_entropy.linear_cross_entropy(
        x.reshape(-1, x.shape[-1]),
        head,
        bias,
        jnp.where(counted, labels, 0).reshape(-1),
        weights,
        block=block,
        of_rows=functools.partial(row_cross_entropy, backend=backend),
    )
    # A factor, so that gradients are NaN as well.
    total = total * jnp.where(jnp.any(labels >= vocab), jnp.nan, 1.0)
    return total / jnp.maximum(jnp.sum(weights), jnp.finfo(weights.dtype).tiny)


class ConvolutionOutput(NamedTuple):
    """What a short convolution returns.

    Attributes:
      output: at least float32.
      final_state: the inputs that the next call needs, oldest first.
    """

    output: Float[Array, "batch length channels"]
    final_state: Float[Array, "batch reach channels"]


def short_convolution(
    x: Float[Array, "batch length channels"],
    weight: Float[Array, "width channels"],
    *,
    initial_state: Float[Array, "batch reach channels"] | None = None,
    segment_ids: SegmentIds | None = None,
    activation: Literal["silu"] | None = None,
    backend: Backend = "auto",
) -> ConvolutionOutput:
    """Each channel's own weighted sum over its last `width` inputs.

    Args:
      x: the inputs.
      weight: of the inputs, the oldest first.
      initial_state: the `width - 1` inputs before these, oldest first; None: zeros.
      segment_ids: documents, which see their own inputs only; padding stands behind the documents.
        None: a row is one document.
      activation: applied to the sum; None: none. Kernels have "silu" alone.
      backend: "auto", "reference" or "pallas", see `pallas_kernels.dispatch`.

    Raises:
      ValueError: an array does not fit the others, or the activation is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from fwpkm_jax.functions import short_convolution
      >>> y, state = short_convolution(jnp.array([[[1.0], [2], [3]]]), jnp.array([[1.0], [1]]))
      >>> y[0, :, 0].tolist(), state[0, :, 0].tolist()
      ([1.0, 3.0, 5.0], [3.0])
    """
    sizes = check_arrays(
        x=(x, "float batch length channels"),
        weight=(weight, "float width channels"),
        segment_ids=(segment_ids, "int batch length"),
    )
    before = {"batch": sizes["batch"], "reach": sizes["width"] - 1, "channels": sizes["channels"]}
    check_arrays(initial_state=(initial_state, "float batch reach channels"), sizes=before)
    functions = {"silu": jax.nn.silu, None: lambda y: y}
    if activation not in functions:
        raise ValueError(f"activation={activation!r} is neither 'silu' nor None.")
    documents = counts = None
    if segment_ids is not None:
        starts, real = _documents(segment_ids, initial_state)
        documents, places = document_numbers(starts), jnp.arange(1, x.shape[1] + 1)
        counts = jnp.max(jnp.where(real, places[None], 0), axis=1)
    if initial_state is None:
        initial_state = jnp.zeros(tuple(before.values()), x.dtype)
    (y,) = convolution.short_convolution(
        x[:, :, None],
        initial_state,
        weight,
        documents=documents,
        parts=(convolution.Part(sizes["channels"]),),
        activation=functions[activation],
        backend=backend,
    )
    return ConvolutionOutput(y, convolution_inputs(initial_state, x, counts, documents))


def _documents(
    segment_ids: SegmentIds, state: Any
) -> tuple[Bool[Array, "batch length"], Bool[Array, "batch length"]]:
    """First tokens of documents, and tokens that are no padding.

    The first document of a row goes on with a state that is given, so that it has no start.
    """
    starts, real = Documents.of(segment_ids)
    starts = starts_at_real(starts, real)
    if state is not None:
        starts = starts & (document_numbers(starts) > 1)
    return starts, real


def _inside(table: Any, ids: Any, weights: Any) -> tuple[Array, Array]:
    """Ids that lie in the table, and the weights, NaN where they did not."""
    inside = (ids >= 0) & (ids < table.shape[1])
    return jnp.where(inside, ids, 0), jnp.where(inside, weights, jnp.nan)


def _check_table(keys: Any, values: Any) -> dict[str, int]:
    """The sizes of a table and of its sub-keys; raises ValueError where they do not fit."""
    sizes = check_arrays(
        keys=(keys, "float heads codebooks subkeys half"),
        values=(values, "float slots value"),
        sizes={"codebooks": 2},
    )
    if sizes["slots"] != sizes["subkeys"] ** 2:
        raise ValueError(
            f"values has {sizes['slots']} rows; {sizes['subkeys']} sub-keys per codebook make "
            f"{sizes['subkeys'] ** 2} slots, a row for each."
        )
    return sizes
