"""Files that lie, for every reader; `python -m tests.faults.fuzz` makes more."""

import pytest

from tests.faults.fuzz.__main__ import _outcome, tried
from tests.faults.fuzz.readers import READERS, Reader


def read_or_refused(fault, name, files):
    for package in ("tokenizers", "mistral_common", READERS[name].needs or "tokenizers"):
        pytest.importorskip(package)
    with fault("a file that lies, within limits of memory and time", files):
        found = tried(name, first=0, files=files)
        assert not found.failures
        assert sum(found.outcomes.values()) == files
        assert found.outcomes["refused"] > 0
        assert found.outcomes["read"] > 0 or files < 1000


@pytest.mark.thorough("safetensors")
@pytest.mark.slow_cases(*(READERS.keys() - {"json lines", "zip", "memory", "safetensors"}))
@pytest.mark.parametrize("name", READERS)
def test_forty_files_that_lie_are_read_or_refused_in_one_line(fault, name):
    read_or_refused(fault, name, 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_two_thousand_files_that_lie_are_read_or_refused_in_one_line(fault, name):
    read_or_refused(fault, name, 2000)


def raises(error: BaseException) -> Reader:
    def read(folder):
        del folder
        raise error

    return Reader(lambda _: None, {}, read)


def test_a_reader_that_fails_in_another_way_is_told(tmp_path):
    """What the test above counts as a failure."""
    from fwpkm_jax.io.untrusted import OutsideFileError

    path = tmp_path / "a"
    assert _outcome(raises(OutsideFileError(path, "ends early")), tmp_path)[0] == "refused"
    for error in (
        ValueError(f"{path} ends early"), TypeError("a"), RecursionError(), MemoryError(),
        SystemExit(2), OutsideFileError("elsewhere", "ends early"),
        FileNotFoundError(f"{path}\nis not there"), FileNotFoundError(f"{path}\x1b[31m"),
    ):  # fmt: skip
        assert _outcome(raises(error), tmp_path)[0] == "traceback", error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("read", "kind"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal"),
        ("while True: pass", "too slow"),
        ("bytes(2**29)", "traceback"),
    ],
)
def test_a_process_that_dies_is_late_or_takes_too_much_is_laid_at_its_file(
    tmp_path, monkeypatch, read, kind
):
    """The second of three files does what no file may do."""
    planted = tmp_path / "sitecustomize.py"
    planted.write_text(
        "import builtins, sys\n"
        "if 'tests.faults.fuzz' in ' '.join(sys.orig_argv):\n"
        "    from tests.faults.fuzz import readers\n"
        "    good, seen = readers.READERS['token files'], []\n"
        "    def read(folder):\n"
        "        seen.append(folder)\n"
        "        first = int(sys.argv[sys.argv.index('--first') + 1])\n"
        "        if len(seen) > 2 and first + len(seen) == 4:  # Two good ones come first.\n"
        f"            {read}\n"
        "        good.read(folder)\n"
        "    readers.READERS['token files'] = readers.dataclasses.replace(good, read=read)\n"
    )
    monkeypatch.setattr("tests.faults.fuzz.__main__._PATHS", [str(tmp_path)])
    found = tried("token files", first=0, files=3)
    assert list(found.failures) == [1]
    assert found.outcomes[kind] == 1
    assert sum(found.outcomes.values()) == 3
