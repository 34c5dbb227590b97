"""The contract of a memory rule as properties that `check_rule` runs."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fwpkm_jax.rules.base import AbstractChunkRule, AbstractRule
from fwpkm_jax.rules.matrix.base import AbstractMatrixRule
from fwpkm_jax.testing.matrix_rules import MATRIX_PROPERTIES
from fwpkm_jax.testing.properties import (
    Property,
    is_float,
    require,
    require_close,
    require_equal,
    require_finite,
    require_same_types,
    run_properties,
)
from fwpkm_jax.testing.rule_case import (
    CHUNK,
    GROUPS,
    LENGTH,
    MakeSequence,
    RuleCase,
    rule_is_a_frozen_value,
    sample_signals,
    scaled,
)
from fwpkm_jax.testing.rule_documents import DOCUMENT_PROPERTIES
from fwpkm_jax.testing.rule_streams import STREAM_PROPERTIES

_BELOW = 1e-6  # Smaller changes of outputs count as rounding.


def check_rule(
    rule: AbstractRule | AbstractMatrixRule,
    *,
    sequence: MakeSequence | None = None,
    properties: Iterable[str] | None = None,
) -> None:
    """Checks that a memory rule keeps the contract of its interface.

    The interface decides which properties are checked: those of `rules.base.AbstractRule` (passes),
    for an `AbstractChunkRule` also those of streams, or those of
    `rules.matrix.AbstractMatrixRule`. Passes are compared in double precision, in which a rule must
    compute when its memory is float64. Choose the smallest sizes that exercise every branch.

    Args:
      rule: an instance.
      sequence: makes the input of `rule.run`, for a rule whose input holds more about each token
        than `rule.sequence` gives by default. It is called as
        `sequence(rule, query, value, gate=, mask=, chunk_size=)`; None: `rule.sequence`. It is
        ignored for matrix rules.
      properties: names of the properties to check, from `rule_properties(rule)`; None: all.

    Raises:
      AssertionError: a property is broken; the message has one line for each of them.
      ValueError: a name in `properties` is unknown.
      TypeError: `rule` implements none of the interfaces.

    Example:
      >>> from fwpkm_jax import FwMLP
      >>> from fwpkm_jax.testing import check_rule
      >>> rule = FwMLP(key_dim=4, value_dim=4, hidden_dim=4)
      >>> check_rule(rule, properties=["rule_is_a_frozen_value"])
    """
    known = rule_properties(rule)
    case = rule if isinstance(rule, AbstractMatrixRule) else RuleCase(rule, sequence)
    run_properties(f"{type(rule).__name__}", case, known, properties)


def rule_properties(rule: AbstractRule | AbstractMatrixRule) -> Mapping[str, Property]:
    """The properties that `check_rule` checks for this rule, by name.

    Raises:
      TypeError: `rule` implements none of the interfaces.
    """
    if isinstance(rule, AbstractMatrixRule):
        return MATRIX_PROPERTIES
    if isinstance(rule, AbstractChunkRule):
        return PASS_PROPERTIES | STREAM_PROPERTIES | DOCUMENT_PROPERTIES
    if isinstance(rule, AbstractRule):
        return PASS_PROPERTIES
    raise TypeError(
        f"rule is {rule!r}; check_rule takes an instance below AbstractRule or AbstractMatrixRule."
    )


def memory_starts_in_float32_and_from_the_key_alone(case: RuleCase) -> None:
    one, two = (case.rule.init(jax.random.key(3)) for _ in range(2))
    for leaf in jax.tree.leaves(one):
        require(
            not is_float(leaf) or leaf.dtype == jnp.float32,
            f"init makes {leaf.dtype}, with 64-bit numbers enabled; name its dtype, as jnp.float32",
        )
    require_equal(one, two, "a second init with the same key")


def pass_equals_the_scan_of_steps(case: RuleCase) -> None:
    """Checks that each group of `run_groups` equals a scan of `step` over that group alone.

    Compares outputs, access, info, memory and all gradients.
    """
    for masked in (False, True):
        together = case.masked if masked else case.plain
        for index in range(GROUPS):
            signals = sample_signals(case.rule, seed=index, masked=masked)
            alone = case.by_steps(case.memory, case.to_sequence(signals))
            ours = _group(together, index)
            require_close(tuple(ours.out), tuple(alone.out), "run_groups: RunOutput")
            require_close(ours.gradients, alone.gradients, "run_groups: gradient")


def pieces_equal_the_whole(case: RuleCase) -> None:
    """Checks that `run` over two pieces, the second from the first's memory, equals the whole."""
    sequence = case.to_sequence(sample_signals(case.rule))
    run = jax.jit(lambda memory, part: case.rule.run(memory, part, chunk_size=CHUNK))
    cut = 2 * CHUNK
    early = run(case.memory, jax.tree.map(lambda x: x[:, :cut], sequence))
    late = run(early.memory, jax.tree.map(lambda x: x[:, cut:], sequence))
    whole = _group(case.plain, 0).out
    require_close(late.memory, whole.memory, "the memory after two pieces")
    output = np.concatenate([early.output, late.output], axis=1)
    require_close(output, whole.output, "the output of two pieces")


def later_chunks_never_change_earlier_outputs(case: RuleCase) -> None:
    sequence, before = case.groups(), np.asarray(case.plain.out.output)
    for start in (CHUNK, 2 * CHUNK):
        changed = scaled(sequence, slice(None), slice(None), slice(start, None))
        after = np.asarray(case.by_groups(changed).out.output)
        require_equal(after[:, :, :start], before[:, :, :start], f"outputs before token {start}")
        moved = np.any(after[:, :, start:] != before[:, :, start:], axis=-1)
        require(
            moved.all(), f"outputs from token {start} on do not depend on their tokens and memory"
        )


def writes_are_read_by_later_chunks(case: RuleCase) -> None:
    sequence = case.groups()
    target = np.array(sequence.target)
    target[:, :, 0] += 1
    before = np.asarray(case.plain.out.output)
    after = np.asarray(case.by_groups(sequence._replace(target=target)).out.output)
    moved = np.max(np.abs(after[:, :, CHUNK:] - before[:, :, CHUNK:]))
    require(
        moved > _BELOW, f"another target in the first chunk moves later outputs by {moved:.1e} only"
    )


def contents_of_padding_do_not_matter(case: RuleCase) -> None:
    others = []
    for seed in range(GROUPS):
        signals = sample_signals(case.rule, seed=seed, masked=True)
        padding = signals.mask == 0
        query = np.where(padding[..., None, None], -signals.query + 1, signals.query)
        value = np.where(padding[..., None], 7.0, signals.value)
        gate = np.where(padding, 0.9, signals.gate)
        others.append(case.to_sequence(signals._replace(query=query, value=value, gate=gate)))
    one, two = case.masked.out, case.by_groups(jax.tree.map(lambda *x: np.stack(x), *others)).out
    for index in range(GROUPS):
        real = sample_signals(case.rule, seed=index, masked=True).mask == 1
        require_equal(
            np.asarray(two.output[index])[real],
            np.asarray(one.output[index])[real],
            "outputs of real tokens, under other padding",
        )
    require_equal(two.memory, one.memory, "the memory, under other padding")


def padding_alone_leaves_the_memory_bit_for_bit(case: RuleCase) -> None:
    """Checks that padding leaves a written memory unchanged, momenta included."""
    signals = sample_signals(case.rule)
    sequence = case.to_sequence(signals._replace(mask=np.zeros_like(signals.mask)))
    out = case.by_groups(jax.tree.map(lambda x: np.stack([x] * GROUPS), sequence)).out
    require_equal(out.memory, case.memories, "the memory after padding alone")
    require_finite(out.info, "info of padding alone")


def memory_keeps_shape_and_dtype_under_any_tokens(case: RuleCase) -> None:
    memory = case.rule.init(jax.random.key(0))
    for dtype in (jnp.bfloat16, jnp.float32):
        sequence = case.to_sequence(sample_signals(case.rule, masked=True), dtype=dtype)
        out = jax.eval_shape(lambda m, s: case.rule.run(m, s, chunk_size=CHUNK), memory, sequence)
        name = jnp.dtype(dtype).name
        require_same_types(out.memory, memory, f"the memory after {name} tokens")
        require(
            out.output.dtype == jnp.float32,
            f"{name} tokens are read as {out.output.dtype}, expected float32",
        )


def gradients_are_finite_and_reach_queries_targets_and_weights(case: RuleCase) -> None:
    """Checks gradients with bfloat16 tokens and a float32 memory."""
    memory = case.rule.init(jax.random.key(0))
    signals = sample_signals(case.rule, masked=True)
    sequence = case.to_sequence(signals, dtype=jnp.bfloat16)

    names = ("query", "target", "write_weight")

    @jax.jit
    def gradient(memory: Any, sequence: Any) -> tuple[dict[str, jax.Array], Any]:
        def loss(inputs: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
            out = case.rule.run(memory, sequence._replace(**inputs), chunk_size=CHUNK)
            return jnp.sum(out.output**2), out

        return jax.grad(loss, has_aux=True)({name: getattr(sequence, name) for name in names})

    gradients, out = gradient(memory, sequence)
    require_same_types(out.memory, memory, "the memory after bfloat16 tokens")
    require_finite(tuple(out), "RunOutput of bfloat16 tokens")
    for name, leaf in gradients.items():
        require(leaf.dtype == jnp.bfloat16, f"the gradient of bfloat16 {name} is {leaf.dtype}")
        require_finite(leaf, f"the gradient of {name}")
        require(np.any(np.asarray(leaf) != 0), f"no gradient reaches {name}")


def groups_are_independent(case: RuleCase) -> None:
    changed = scaled(case.groups(), 1)
    out, other = case.plain.out, case.by_groups(changed).out
    for index in (0, 2):
        require_equal(
            tuple(_group(other, index)), tuple(_group(out, index)), f"group {index} beside another"
        )
    require(np.any(np.asarray(other.output[1]) != np.asarray(out.output[1])), "group 1 is unread")


def reports_and_access_have_the_declared_shapes(case: RuleCase) -> None:
    """Checks that `info` is a NamedTuple of scalars, and `access` has one row per token."""
    rule, out = case.rule, _group(case.plain, 0).out
    if out.info is not None:
        require(hasattr(out.info, "_fields"), "info is not a NamedTuple, whose fields name metrics")
        chunks = -(-LENGTH // CHUNK)
        for name, leaf in zip(out.info._fields, out.info, strict=True):
            if leaf is not None:
                require(leaf.shape == (chunks,), f"step reports {name}{list(leaf.shape[1:])}")
    for leaf in jax.tree.leaves(out.access):
        require(
            leaf.shape[:2] == out.output.shape[:2],
            f"access has a leaf {leaf.shape}, expected the leading axes {out.output.shape[:2]}",
        )
    if rule.num_slots is not None:
        ids, weights = np.asarray(out.access.slot_ids), out.access.slot_weights
        require(ids.shape == weights.shape, "slot_ids and slot_weights have different shapes")
        require(
            ids.min() >= 0 and ids.max() < rule.num_slots,
            f"slot_ids reach from {ids.min()} to {ids.max()}, num_slots is {rule.num_slots}",
        )


def memory_specs_name_the_layout_of_every_leaf(case: RuleCase) -> None:
    memories = jax.eval_shape(lambda x: x, case.memories)
    specs = case.rule.memory_specs(memories, group_axes=("data",), axes=None)
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    require(
        jax.tree.structure(specs, is_leaf=is_spec) == jax.tree.structure(memories),
        "memory_specs has another structure than the memory",
    )
    require(
        all(is_spec(x) for x in jax.tree.leaves(specs, is_leaf=is_spec)),
        "memory_specs holds something that is no PartitionSpec",
    )


def _group(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda x: np.asarray(x)[index], tree)


PASS_PROPERTIES: dict[str, Property] = {
    check.__name__: check
    for check in (
        rule_is_a_frozen_value,
        memory_starts_in_float32_and_from_the_key_alone,
        pass_equals_the_scan_of_steps,
        pieces_equal_the_whole,
        later_chunks_never_change_earlier_outputs,
        writes_are_read_by_later_chunks,
        contents_of_padding_do_not_matter,
        padding_alone_leaves_the_memory_bit_for_bit,
        memory_keeps_shape_and_dtype_under_any_tokens,
        gradients_are_finite_and_reach_queries_targets_and_weights,
        groups_are_independent,
        reports_and_access_have_the_declared_shapes,
        memory_specs_name_the_layout_of_every_leaf,
    )
}
"""Properties of every `AbstractRule`, by name."""
