"""Faults in `fwpkm_jax.memories` and in how generation keeps and goes on from states."""

from lab.seeded_faults.fault import Fault

_MEMORIES = ("tests/memories", "tests/faults/test_memories.py")
_CHAT = ("tests/cli/test_chat.py",)
_GENERATION = ("tests/generation/test_generate.py",)

FAULTS = (
    Fault(
        "rows: compared as numbers, so that a zero's sign is lost",
        "    return np.ascontiguousarray(_rows(x)).view(np.uint8)",
        "    return _rows(x)",
        _MEMORIES,
    ),
    Fault(
        "rows: the last block is not compared",
        "        for start in range(0, len(new), step)\n",
        "        for start in range(0, len(new) - step, step)\n",
        _MEMORIES,
    ),
    Fault(
        "memories: a checksum that differs is accepted",
        'if found != metadata["checksum"]:',
        "if not found:",
        _MEMORIES,
    ),
    Fault(
        "memories: any base of the right name is accepted",
        'file.read(link, expected=at["checksum"])',
        "file.read(link)",
        _MEMORIES,
    ),
    Fault(
        "memories: those of other weights are accepted",
        'if facts["weights"] != weights:',
        "if not weights:",
        _MEMORIES,
    ),
    Fault(
        "memories: a base that forks need is removed",
        "if name not in needed and _OURS.fullmatch(name):",
        "if _OURS.fullmatch(name):",
        _MEMORIES,
    ),
    Fault(
        "memories: written in place",
        "with replacing(path) as file:",
        'with path.open("wb") as file:',
        _MEMORIES,
        "fwpkm_jax/memories",
    ),
    Fault(
        "memories: waiting tokens are dropped without caches",
        "model.reset_caches(stream._replace(layers=layers), pending=False)",
        "model.reset_caches(stream._replace(layers=layers), pending=True)",
        _MEMORIES,
    ),
    Fault(
        "memories: anyone may change one that is held",
        "if lock is not None and thread == threading.get_ident():",
        "if lock is not None:",
        _MEMORIES,
    ),
    Fault(
        "generation: a kept state is given away",
        "        state = jax.tree.map(jnp.copy, state)\n",
        "        pass\n",
        _GENERATION,
    ),
    Fault(
        "attention: a larger cache keeps the old places",
        "cache.positions % capacity, capacity)\n    rows = jnp.arange(batch",
        "cache.positions % cache.keys.shape[1], capacity)\n    rows = jnp.arange(batch",
        ("tests/core/attention/test_cached.py",),
    ),
    Fault(
        "chat: going back reads nothing from disk",
        'memories.restore(self._folder, self.name, f"{self.name}@{point}")',
        "pass",
        _CHAT,
    ),
)
