"""Checks of a rule's arguments, with messages that name the argument."""

import functools
from typing import Any

import jax

from fwpkm_jax.core.checks import check_arrays, check_tree
from fwpkm_jax.core.chunks import AnyChunk, Memory


@functools.cache
def memory_shapes(rule: Any) -> Any:
    """Shapes and dtypes of a rule's memory, without allocating it."""
    return jax.eval_shape(lambda: rule.init(jax.random.key(0)))


def check_memory(rule: Any, memory: Memory, *, groups: bool = False) -> None:
    """Raises a ValueError unless the memory has the shapes of `rule.init`.

    Args:
      rule: whose memory it is.
      memory: one memory, or with `groups` several, leaves `[groups, ...]`.
      groups: whether there is a leading axis of groups.
    """
    check_tree("memory", memory, memory_shapes(rule), leading=("groups",) if groups else ())


def check_query(rule: Any, query: jax.Array) -> None:
    """Raises a ValueError unless the queries are `[tokens, heads, key]` as the rule reads them."""
    sizes = {"heads": rule.num_heads, "key": rule.key_dim}
    check_arrays(query=(query, "float tokens heads key"), sizes=sizes)


def check_signals(rule: Any, query: Any, value: Any, gate: Any, mask: Any) -> None:
    """Raises a ValueError unless these are what `sequence` makes chunks of."""
    check_arrays(
        query=(query, "float batch length heads key"),
        value=(value, "float batch length value"),
        gate=(gate, "float batch length"),
        mask=(mask, "mask batch length"),
        sizes={"heads": rule.num_heads, "key": rule.key_dim, "value": rule.value_dim},
    )


def check_run(rule: Any, memory: Memory, sequence: AnyChunk) -> None:
    """Raises a ValueError unless one memory and one sequence fit the rule and each other."""
    check_memory(rule, memory)
    names = {
        "sequence.query": (sequence.query, "float batch length heads key"),
        "sequence.target": (sequence.target, "float batch length value"),
        "sequence.write_weight": (sequence.write_weight, "float batch length"),
    }
    sizes = {"heads": rule.num_heads, "key": rule.key_dim, "value": rule.value_dim}
    check_arrays(sizes=sizes, **names)
