"""`fwpkm memories RUN [--show|--delete NAME] [--fork|--restore NAME OTHER]`: named memories.

Exit codes: 0 done; 2 wrong command line, no such run or memory, or a memory that others share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fwpkm_jax import memories
from fwpkm_jax.cli.options import RunArgument, parse_options
from fwpkm_jax.config import stored_config
from fwpkm_jax.evaluation.display.tables import format_table
from fwpkm_jax.io.untrusted import printable, shown
from fwpkm_jax.literals import some
from fwpkm_jax.memories import Description
from fwpkm_jax.run.conversation import is_start, memory_folder
from fwpkm_jax.storage.addresses import address_of, scheme_of
from fwpkm_jax.storage.stores import Store


@dataclass(frozen=True, kw_only=True)
class MemoriesOptions:
    """Lists the memories of a run, or describes, deletes, forks or restores one."""

    run: RunArgument
    """Run directory."""
    memories: Path | None = None
    """Folder of the memories, also in a bucket; None: RUN/memories."""
    show: str | None = None
    """Name of a memory to describe."""
    delete: str | None = None
    """Name of a memory to delete."""
    fork: tuple[str, str] | None = None
    """NAME NEW: makes NEW a memory with the contents of NAME, in a few kilobytes. `alice
    alice@monday` makes a point of alice to go back to."""
    restore: tuple[str, str] | None = None
    """NAME POINT: makes NAME again what its point or fork POINT is."""
    keep_forks: bool = False
    """With --delete: delete it although points or other memories were forked from it; what they
    share with it stays on disk."""


def main(arguments: Sequence[str], program: str = "fwpkm memories") -> int:
    """Carries out a command line; returns the program's exit code."""
    options = parse_options(MemoriesOptions, arguments, program, addresses=("run", "memories"))
    print(carried_out(options))
    return 0


def carried_out(options: MemoriesOptions) -> str:
    """Does what the options ask for; what is to be printed.

    Raises:
      ValueError: two things are asked for at once, or the memory cannot be deleted or read.
      FileNotFoundError: there is no such run or memory.
    """
    show, delete = options.show, options.delete
    commands = {name: getattr(options, name) for name in ("show", "delete", "fork", "restore")}
    asked = [f"{name}={one!r}" for name, one in commands.items() if one is not None]
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(asked[:2])} are two commands; give one.")
    if options.keep_forks and delete is None:
        raise ValueError("keep_forks=True has no effect without --delete NAME.")
    if options.keep_forks and is_start(delete or ""):
        raise ValueError(
            f"delete={delete!r} is the memory that all others of its step begin with, and are "
            "compared with; delete those first, without keep_forks=True."
        )
    folder = memory_folder(options.run, options.memories)
    stored_config(options.run)  # A mistyped run has no memories, which is another matter.
    if delete is not None:
        memories.delete(folder, delete, keep_forks=options.keep_forks)
        return f"Deleted {delete!r}."
    if options.fork is not None:
        memories.fork(folder, *options.fork)
        return "Forked {!r} as {!r}.".format(*options.fork)
    if options.restore is not None:
        memories.restore(folder, *options.restore)
        return "Made {!r} again what {!r} is.".format(*options.restore)
    if show is not None:
        return "\n".join(_facts(memories.describe(folder, show)))
    return _list(folder)


def _list(folder: Path) -> str:
    found = memories.describe_all(folder)
    if not found:
        return f"There are no memories in {address_of(folder)}."
    described = {name: one for name, one in found.items() if not isinstance(one, str)}
    rows = [
        [
            name,
            shown(one.saved, 40),
            _tokens(one),
            one.keep,
            f"{one.num_bytes:,}",
            shown(_origin(one)),
        ]
        for name, one in described.items()
    ]
    lines = [printable(one) for one in found.values() if isinstance(one, str)]
    if rows:
        header = ["name", "saved", "tokens read", "kept", "bytes", "forked from"]
        lines.insert(0, format_table(header, rows))
    size = _num_bytes(folder)
    lines.append(f"{len(found)} in {address_of(folder)}, {size:,} bytes with what forks share.")
    return "\n".join(lines)


def _origin(one: Description) -> str:
    """What a memory was forked from; a point is named as one."""
    owner, _, point = one.name.partition("@")
    if point:
        return f"point of {owner}"
    base = one.base or "-"
    return f"its point {base}" if base.startswith(f"{one.name}@") else base


def _num_bytes(folder: Path) -> int:
    if scheme_of(folder) is not None:
        sizes = Store(str(folder)).sizes()
        return sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
    # A base and the memory that it once was may be one file under two names.
    files = [path.lstat() for path in folder.rglob("*.safetensors")]
    return sum({stat.st_ino: stat.st_size for stat in files}.values())


def _facts(one: Description) -> list[str]:
    kept = {"all": "caches, too", "memory": "without caches"}[one.keep]
    lines = [
        f"{one.name}: {_tokens(one)} tokens read, saved {shown(one.saved, 40)} ({kept}), "
        f"{one.num_bytes:,} bytes.",
        f"Of {shown(one.origin)}." if one.origin else "",
        f"Forked from {shown(one.base)}." if one.base else "",
        f"Forks: {some(one.forks)}." if one.forks else "",
    ]
    for name, (own, total) in one.rows.items():
        if own and name.startswith("stream/memory/"):
            name = shown(name.removeprefix("stream/memory/"))
            share = own / max(total, 1)
            lines.append(f"{name}: {own:,} of {total:,} rows in its own file ({share:.2%}).")
    return [line for line in lines if line]


def _tokens(one: Description) -> str:
    return " ".join(f"{count:,}" for count in one.num_read)
