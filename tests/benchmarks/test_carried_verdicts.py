"""The verdicts on kernels of one machine, taken by another."""

from benchmarks import carried_verdicts
from pallas_kernels import verdicts
from pallas_kernels.verdicts import Verdict

AGREES, DIFFERS = "tests.checks:agrees", "tests.checks:differs"


def test_verdicts_travel_to_another_machine_in_one_file(tmp_path, monkeypatch):
    file = tmp_path / "verdicts.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    assert carried_verdicts.take(file) == 0
    for check in (AGREES, DIFFERS):
        verdicts.verdict(check, "gpu", "a device", lambda: Verdict("made here"))
    carried_verdicts.give(file)
    for kept in (tmp_path / "here" / "fwpkm_jax" / "kernel_checks").iterdir():
        kept.write_text("[]")  # No verdict: the check runs.
    verdicts.verdict(AGREES, "gpu", "a device", lambda: Verdict("made again"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
    verdicts.verdict(AGREES, "gpu", "a device", lambda: Verdict("made there"))
    assert carried_verdicts.take(file) == 2

    def again() -> Verdict:
        raise AssertionError("the verdict travelled")

    assert verdicts.verdict(AGREES, "gpu", "a device", again).failure == "made there"
    assert verdicts.verdict(DIFFERS, "gpu", "a device", again).failure == "made here"
