"""Memories that last: saved, loaded, forked and restored by name, in a folder.

A saved memory holds everything that a conversation needs to go on as if it had never stopped: fast
weights, tokens that wait to be written, caches, the next token's logits. It belongs to the slow
weights that wrote it; a file of others, or a damaged one, is refused.
"""

from fwpkm_jax.memories.places import hold, is_name
from fwpkm_jax.memories.saved import describe, describe_all, load, save, written_rows
from fwpkm_jax.memories.store import Description, delete, fork, names, restore

__all__ = [
    "Description",
    "delete",
    "describe",
    "describe_all",
    "fork",
    "hold",
    "is_name",
    "load",
    "names",
    "restore",
    "save",
    "written_rows",
]
