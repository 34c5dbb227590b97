"""`select_slots`: chooses an implementation of the operation and defines its derivatives."""

import functools

import jax
import jax.numpy as jnp

from fwpkm_jax.core.array_types import Queries, SubKeys
from fwpkm_jax.core.slots.keys.addressing import (
    Address,
    Nonlinearity,
    Normalization,
    Score,
    SubKeyChoice,
    slot_weights,
    sub_key_scores,
)
from pallas_kernels import dispatch
from pallas_kernels.product_top_k import reference, vjp
from pallas_kernels.product_top_k.reference import Selection
from pallas_kernels.product_top_k.specs import CHECK_RATIO, CHECKED, SPECS, TopKSpec, sample

OP = "product_top_k"
WIDEST_HALF = {"gpu": 320, "tpu": 512}
"""Largest supported width of half a query. A GPU program keeps three bfloat16 terms of 64 halves
and two tiles of keys in shared memory: 221,184 of 232,448 bytes at 320 columns."""


def select_slots(
    queries: Queries,
    keys: SubKeys,
    *,
    top_k: int,
    score: Score = "idw",
    normalization: Normalization = "token",
    nonlinearity: Nonlinearity = "softmax",
    temperature: float = 1.0,
    backend: dispatch.Backend = "auto",
) -> Selection:
    """Each query's best slots and their read weights, without a score matrix in device memory.

    The kernels score a tile of tokens against one codebook after the other and keep the best
    sub-keys of each. Then they merge the pairs with ranks i and j (from 1) for which i j <= top_k.
    Scores have float32 accuracy. Among equal scores the lower sub-key wins, then the lower slot.
    Gradients flow through the chosen scores only, so no score matrix is stored for them. The
    operation can be differentiated twice, batched and scanned over.

    Args:
      queries: `[tokens, heads, key]`; the first half of `key` addresses rows.
      keys: `[heads, 2, subkeys, key // 2]`, rows first.
      top_k: slots per head, at most `subkeys`.
      score: `idw` or `dot`, see `core.slots.keys.addressing.sub_key_scores`.
      normalization: see `core.slots.keys.addressing.slot_weights`, also for the next two arguments.
      nonlinearity: function from slot scores to weights.
      temperature: divides the slot scores.
      backend: `auto`, `reference` or `pallas`; kernels accept float32 only.

    Returns:
      The address of `keys.addressing.product_top_k` and the weights `[tokens, heads, top_k]`.

    Raises:
      ValueError: as `keys.addressing.product_top_k`, or there is no kernel for the platform.
      NotImplementedError: `pallas` with inputs that its kernel does not take.

    References: Lample et al. 2019, arXiv:1907.05242; Zhao and Jones 2026, arXiv:2601.00671.
    """
    choice = choose_sub_keys(queries, keys, top_k=top_k, score=score, backend=backend)
    slot_ids, slot_scores = pair_sub_keys(choice, num_subkeys=keys.shape[2], backend=backend)
    weights = slot_weights(
        slot_scores,
        normalization=normalization,
        nonlinearity=nonlinearity,
        temperature=temperature,
    )
    return Selection(Address(slot_ids, slot_scores, *choice), weights)


def choose_sub_keys(
    queries: Queries,
    keys: SubKeys,
    *,
    top_k: int,
    score: Score = "idw",
    backend: dispatch.Backend = "auto",
) -> SubKeyChoice:
    """The first half of `select_slots`: each codebook's best sub-keys.

    A scan whose keys move chunk by chunk needs no more; see `pair_sub_keys` for the rest.
    """
    chosen = dispatch.implementation(
        OP,
        backend,
        supports=lambda kernel: unsupported(kernel, queries, keys, top_k=top_k),
        check=check_selection,
    )
    return _choose(chosen, top_k, score, queries, keys)


def pair_sub_keys(
    choice: SubKeyChoice, *, num_subkeys: int, backend: dispatch.Backend = "auto"
) -> tuple[jax.Array, jax.Array]:
    """The second half of `select_slots`: ids and scores of the best slots, of any number of tokens.

    Differentiable in the scores. Arguments and results as `core.slots.keys.addressing.best_pairs`.
    """
    chosen = dispatch.implementation(
        OP,
        backend,
        supports=lambda kernel: unsupported_choice(kernel, choice, num_subkeys=num_subkeys),
        check=check_selection,
    )
    return _pair(chosen, num_subkeys, *choice)


def unsupported(
    kernel: dispatch.Kernel,
    queries: jax.Array | jax.ShapeDtypeStruct,
    keys: jax.Array,
    *,
    top_k: int,
) -> str | None:
    """None, or why the kernel does not accept these arrays."""
    # Shapes that make no sense are refused in the words of the reference.
    jax.eval_shape(functools.partial(reference.choose_sub_keys, top_k=top_k), queries, keys)
    dtypes = {queries.dtype, keys.dtype}
    if dtypes != {jnp.dtype(jnp.float32)}:
        return f"dtypes {queries.dtype} and {keys.dtype}; both must be float32"
    subkeys, half = keys.shape[2:]
    if queries.shape[0] == 0:
        return "0 tokens"
    widest = WIDEST_HALF[kernel]
    if subkeys > 1024 or top_k > 32 or half > widest:
        return f"subkeys={subkeys}, top_k={top_k}, half={half}; at most 1024, 32 and {widest}"
    return None


def unsupported_choice(
    kernel: dispatch.Kernel, choice: SubKeyChoice, *, num_subkeys: int
) -> str | None:
    """None, or why the kernel does not pair these sub-keys."""
    del kernel  # All of them have the same limits here.
    tokens, top_k = choice.sub_key_ids.shape[0], choice.sub_key_ids.shape[3]
    if choice.sub_key_scores.dtype != jnp.float32:
        return f"scores in {choice.sub_key_scores.dtype}; they must be float32"
    if tokens == 0:
        return "0 tokens"
    if num_subkeys > 1024 or top_k > 32:
        return f"subkeys={num_subkeys}, top_k={top_k}; at most 1024 and 32"
    return None


def _choose_by(
    chosen: dispatch.Implementation, top_k: int, score: Score, queries: Queries, keys: SubKeys
) -> SubKeyChoice:
    """The best sub-keys by one implementation."""
    way = reference if chosen == "reference" else dispatch.module_of(OP, chosen)
    return way.choose_sub_keys(queries, keys, top_k=top_k, score=score)


_choose = jax.custom_vjp(_choose_by, nondiff_argnums=(0, 1, 2))


def _choose_forward(chosen, top_k, score, queries, keys):
    # This calls the differentiable function, not the kernel, so that second derivatives exist.
    choice = _choose(chosen, top_k, score, queries, keys)
    return choice, (queries, keys, choice)


def _choose_backward(chosen, top_k, score, residuals, cotangents):
    del chosen, top_k
    queries, keys, choice = residuals
    return vjp.cotangents(queries, keys, choice, cotangents[1], score=score)


_choose.defvjp(_choose_forward, _choose_backward)


def _pair_by(
    chosen: dispatch.Implementation, num_subkeys: int, ids: jax.Array, scores: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Ids and scores of the best slots by one implementation."""
    way = reference if chosen == "reference" else dispatch.module_of(OP, chosen)
    return way.pair_sub_keys(SubKeyChoice(ids, scores), num_subkeys=num_subkeys)


_pair = jax.custom_vjp(_pair_by, nondiff_argnums=(0, 1))


def _pair_forward(chosen, num_subkeys, ids, scores):
    slot_ids, slot_scores = _pair(chosen, num_subkeys, ids, scores)
    return (slot_ids, slot_scores), (slot_ids, ids)


def _pair_backward(chosen, num_subkeys, residuals, cotangents):
    del chosen
    return None, vjp.of_pairs(cotangents[1], *residuals, num_subkeys=num_subkeys)


_pair.defvjp(_pair_forward, _pair_backward)


def _address(
    chosen: dispatch.Implementation, top_k: int, score: Score, queries: Queries, keys: SubKeys
) -> Address:
    """The address by one implementation."""
    choice = _choose(chosen, top_k, score, queries, keys)
    return Address(*_pair(chosen, keys.shape[2], *choice), *choice)


def check_selection(kernel: dispatch.Kernel) -> None:
    """Runs the kernel on this device; raises if it differs from the reference."""
    for spec in (spec for spec in SPECS if spec.name in CHECKED):
        for name, error in selection_errors(kernel, spec, sample(spec, jnp.float32)).items():
            if not error <= CHECK_RATIO:
                raise AssertionError(f"{name} differs by {error:.2g} of its norm ({spec.name})")


def selection_errors(
    kernel: dispatch.Implementation, spec: TopKSpec, arrays: dict[str, jax.Array]
) -> dict[str, float]:
    """Differences of an implementation's best scores, and of its ids' scores, from the reference.

    Among thousands of scores some differ by less than rounding, so either order is correct.
    Therefore ids are compared by the scores that the reference gives them. Ids must not repeat.

    Returns:
      Differences relative to the norm, by name; `repeated_ids` is the share of repeated ids.
    """

    @jax.jit
    def errors(queries: jax.Array, keys: jax.Array) -> dict[str, jax.Array]:
        actual = _address(kernel, spec.top_k, spec.score, queries, keys)
        expected = reference.address(queries, keys, top_k=spec.top_k, score=spec.score)
        every = sub_key_scores(queries, keys, score=spec.score)
        rows, columns = actual.slot_ids // spec.subkeys, actual.slot_ids % spec.subkeys
        of_slots = sum(
            jnp.take_along_axis(every[:, :, codebook], ids, axis=-1)
            for codebook, ids in enumerate((rows, columns))
        )
        of_sub_keys = jnp.take_along_axis(every, actual.sub_key_ids, axis=-1)
        found = {
            "slot_scores": (actual.slot_scores, expected.slot_scores),
            "sub_key_scores": (actual.sub_key_scores, expected.sub_key_scores),
            "scores of slot_ids": (of_slots, expected.slot_scores),
            "scores of sub_key_ids": (of_sub_keys, expected.sub_key_scores),
        }
        norms = {
            name: jnp.linalg.norm((a - e).ravel()) / jnp.linalg.norm(e.ravel())
            for name, (a, e) in found.items()
        }
        ids = (actual.slot_ids, actual.sub_key_ids)
        return norms | {"repeated_ids": jnp.stack([_repeated(x) for x in ids]).max()}

    return {name: float(error) for name, error in errors(**arrays).items()}


def _repeated(ids: jax.Array) -> jax.Array:
    """The share of ids that equal another id of the same query."""
    ids = jnp.sort(ids, axis=-1)
    return jnp.mean((ids[..., 1:] == ids[..., :-1]).astype(jnp.float32))
