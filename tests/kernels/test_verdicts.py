"""Checks in separate processes: their outcomes, stored verdicts, and the chosen implementation."""

import time
from typing import Any

import jax
import pytest

from pallas_kernels import check_here, dispatch, verdicts
from pallas_kernels.verdicts import Verdict
from tests.kernels import planted_checks as planted
from tests.kernels.entry import checked_again


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fwpkm_jax" / "kernel_checks"


def named(check):
    return f"{planted.__name__}:{check.__name__}"


def test_a_check_that_hangs_is_ended():
    began = time.perf_counter()
    found = verdicts.run_apart(named(planted.hangs), "gpu", "cpu", limit_s=0.5)
    assert found == Verdict("no answer after 0.5 s")
    assert time.perf_counter() - began < 30


@pytest.mark.slow
def test_a_hopper_gpu_uses_what_agrees_and_says_why_it_leaves_the_rest(monkeypatch, caplog, cache):
    kind = jax.devices()[0].device_kind
    monkeypatch.setattr(dispatch, "_device_lacks", lambda kernel: None)
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")

    def chosen(check):
        operation = dispatch.Operation(check.__name__, lambda kernel: None, check=named(check))
        return operation.choose("auto")

    reasons: dict[Any, str] = {
        planted.differs: "AssertionError: gpu's rows differ by 0.3 of their norm",
        planted.dies: "its process died by SIGSEGV",
        planted.exits: "its process ended with exit code 1: no CUDA driver",
    }
    with checked_again(), dispatch.default_backend("auto"), dispatch._simulation(None):
        assert chosen(planted.agrees) == "gpu"
        assert {chosen(check) for check in reasons} == {"reference"}
    said = [record.getMessage() for record in caplog.records]
    for check in (planted.agrees, *reasons):
        assert said.pop(0).startswith(f"{check.__name__}: its kernel is compared with plain JAX")
        if check in reasons:
            assert said.pop(0) == (
                f"{check.__name__} runs its reference: "
                f"the gpu kernel failed its check on this device: {reasons[check]}."
            )
    assert not said
    # What may end otherwise at the next start is not kept.
    assert len(list(cache.iterdir())) == 3

    def again():
        raise AssertionError("checked again")

    for check in (planted.agrees, planted.differs, planted.dies):
        assert verdicts.verdict(named(check), "gpu", kind, again).failure == reasons.get(check)
    for kernel, other in [("gpu", "another GPU"), ("tpu", kind)]:
        with pytest.raises(AssertionError, match="checked again"):
            verdicts.verdict(named(planted.agrees), kernel, other, again)
    with monkeypatch.context() as patch:
        patch.setattr(verdicts, "_content", lambda: "a kernel was edited")
        with pytest.raises(AssertionError, match="checked again"):
            verdicts.verdict(named(planted.agrees), "gpu", kind, again)


@pytest.mark.thorough
def test_a_check_apart_notices_another_device(tmp_path, monkeypatch):
    """Also in a folder whose files are called like modules."""
    for name in ("json", "jax", "pallas_kernels"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    found = verdicts.run_apart(named(planted.agrees), "gpu", "NVIDIA H100")
    assert found == Verdict("the check's process found a cpu", lasting=False)


def test_a_full_device_may_have_room_at_the_next_start():
    found = check_here.checked(planted.finds_no_memory, "gpu")
    assert found == Verdict("RuntimeError: RESOURCE_EXHAUSTED: out of memory", lasting=False)


def test_nothing_is_kept_of_a_check_without_a_name_or_where_no_file_can_be_written(cache):
    def run():
        return Verdict(None)

    assert verdicts.verdict(lambda kernel: None, "gpu", "cpu", run) == Verdict(None)
    assert not cache.exists()
    cache.parent.write_text("")  # A file where the folder should be.
    assert verdicts.verdict(named(planted.agrees), "gpu", "cpu", run) == Verdict(None)
