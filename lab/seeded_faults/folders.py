"""Faults in locks, temporary files, plugins and what a terminal shows."""

from lab.seeded_faults.fault import Fault

_FILES = ("tests/test_whole_files.py",)
_LOCK = ("tests/training/runs/test_lock.py",)
_PLUGINS = ("tests/test_plugins.py",)
_SHOWN = ("tests/test_command_line.py", "tests/cli/test_memories_command.py")

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
        "files: an unfinished file that is held is removed",
        "fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)\n                path.unlink()",
        "path.unlink()",
        _FILES,
    ),
    Fault(
        "files: an address is taken for a path",
        "if _URL.match(str(path)):",
        "if _URL.match(str(path)) and not name:",
        (*_FILES, "tests/test_command_line.py"),
    ),
    Fault(
        "lock: one that is gone does not stop its holder",
        "        if self._lost:\n            raise LostLockError(",
        "        if self._lost and False:\n            raise LostLockError(",
        _LOCK,
        under="fwpkm_jax/training/runs/lock.py",
    ),
    Fault(
        "lock in a bucket: one that is gone does not stop its holder",
        "        if self._lost:\n            raise LostLockError(",
        "        if self._lost and False:\n            raise LostLockError(",
        ("tests/training/runs/test_mirror.py",),
        under="fwpkm_jax/training/runs/store_lock.py",
    ),
    Fault(
        "lock in a bucket: another's counts as the session's own",
        "ours = found is not None and found[0] == self._content",
        "ours = found is not None",
        ("tests/training/runs/test_mirror.py",),
    ),
    Fault(
        "lock: another's is removed at the end",
        "            if _is_at(self._file, self.path):\n                self.path.unlink()",
        "            self.path.unlink()",
        _LOCK,
    ),
    Fault(
        "lock: the directory is not held",
        "if granted and whole:",
        "if granted and not whole:",
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
        "plugins: a worker of the data imports from the current folder",
        '    os.environ[name] = "1"\n',
        "    os.environ[name] = before or ''\n",
        ("tests/data/test_batches.py", "-m", "not slow", "-k", "workers"),
    ),
    Fault(
        "plugins: a kernel's check imports from the current folder",
        '[sys.executable, "-P", "-m", _PROGRAM]',
        '[sys.executable, "-m", _PROGRAM]',
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
