"""Faults in locks, temporary files, plugins and what a terminal shows."""

from lab.seeded_faults.fault import Fault

_FILES = ("tests/io/test_atomic.py",)
_LOCK = ("tests/storage/test_lock.py",)
_OUTAGES = ("tests/storage/test_outages.py",)
_PLUGINS = ("tests/test_plugins.py",)
_SHOWN = ("tests/io/test_terminal.py", "tests/cli/test_memories_command.py")

FAULTS = (
    Fault(
        "files: a lock or log is opened through a link",
        "flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC",
        "flags |= os.O_NONBLOCK | os.O_CLOEXEC",
        _FILES,
    ),
    Fault(
        "files: a second name of another file counts as plain",
        "if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:",
        "if not stat.S_ISREG(facts.st_mode):",
        _FILES,
    ),
    Fault(
        "files: a linked folder counts as the run's own",
        "if not stat.S_ISDIR(path.lstat().st_mode):",
        "if not stat.S_ISDIR(path.stat().st_mode):",
        _FILES,
    ),
    Fault(
        "files: what stands in the place of an unfinished file is removed",
        "if plain and is_unfinished(found, path):",
        "if is_unfinished(found, path):",
        _FILES,
    ),
    Fault(
        "files: an address is taken for a path",
        "if scheme_of(path) is not None:\n        given",
        "if scheme_of(path) is not None and not name:\n        given",
        (*_FILES, "tests/io/test_terminal.py"),
    ),
    Fault(
        "lock: one that is gone does not stop its holder",
        "        if self._lost:\n            raise LostLockError(",
        "        if self._lost and False:\n            raise LostLockError(",
        _LOCK,
    ),
    Fault(
        "lock in a bucket: another's counts as the session's own",
        'return found is not None and (parse_record(found[0]) or {}).get("token") == self._token',
        "return found is not None",
        _LOCK,
    ),
    Fault(
        "lock in a bucket: a store that is away ends the session at once",
        "self._lost = self._lost or _now() - self._alive_at > SILENCE",
        "self._lost = True",
        _LOCK,
    ),
    Fault(
        "lock: what is no record of this program is taken over",
        "if holder is None or (found and not holder and not place.on_disk):",
        "if False:",
        _LOCK,
    ),
    Fault(
        "bucket: what cannot be read counts as damaged",
        "except OutsideFileError as error:\n                        self.damaged[number]",
        "except (OSError, ValueError) as error:\n                        self.damaged[number]",
        ("tests/storage/test_sync.py",),
    ),
    Fault(
        "bucket: the files of a damaged marker are removed",
        "if found and found[1] not in named and int(found[2]) not in kept:",
        "if found and found[1] not in named:",
        ("tests/storage/test_sync.py",),
    ),
    Fault(
        "bucket: an answer that was cut is taken as whole",
        "if found != expected:",
        "if False:",
        _OUTAGES,
    ),
    Fault(
        "lock: another's is removed at the end",
        "            if self.is_ours():\n                self.where.unlink()",
        "            self.where.unlink()",
        _LOCK,
    ),
    Fault(
        "lock: the directory is not held",
        "if self.granted and whole:",
        "if self.granted and not whole:",
        _LOCK,
    ),
    Fault(
        "plugins: what a run names is not asked for",
        "unnamed = [module for module in modules if module not in sys.modules]",
        "unnamed = [module for module in modules if not module]",
        _PLUGINS,
    ),
    Fault(
        "plugins: found in the current folder",
        'sys.path[:] = [entry for entry in sys.path if entry not in ("", ".")]',
        "sys.path[:] = list(sys.path)",
        _PLUGINS,
    ),
    Fault(
        "plugins: a kernel's check imports from the current folder",
        '(sys.executable, "-P", "-m", _PROGRAM)',
        '(sys.executable, "-m", _PROGRAM)',
        ("tests/kernels/test_verdicts.py",),
    ),
    Fault(
        "shown: escapes of a terminal are printed",
        'return character in _TURNS or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")',
        'return character in _TURNS or unicodedata.category(character) in ("Cs", "Zl", "Zp")',
        _SHOWN,
    ),
    Fault(
        "shown: all names of a folder are listed",
        "if len(names) <= most:",
        "if len(names) >= most:",
        _SHOWN,
    ),
)
