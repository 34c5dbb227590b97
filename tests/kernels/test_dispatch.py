"""The choice of an implementation: by platform, request, inputs and the device's own check."""

import logging
from collections.abc import Iterator

import jax
import jaxtyping
import pytest

from pallas_kernels import dispatch
from tests.kernels.entry import checked_again


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Clears earlier checks and log lines, and ignores --backend for `auto`."""
    with checked_again(), dispatch.default_backend("auto"), dispatch._simulation(None):
        yield


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process believes that it runs on a Hopper GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "_device_lacks", lambda kernel: None)


def agree(kernel):
    del kernel


def differ(kernel):
    raise AssertionError(f"{kernel} is off by 3")


def choose(backend, *, supports=lambda kernel: None, **options):
    """What an operation without arguments chooses."""
    options = {"name": "op", "check": agree, **options}
    return dispatch.Operation(refuses=supports, **options).choose(backend)


def test_a_cpu_runs_the_reference_and_says_so_once(caplog):
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        assert [choose("auto") for _ in range(3)] == ["reference"] * 3
    assert [r.getMessage() for r in caplog.records] == [
        "op runs its reference: no kernels for cpu."
    ]


def test_a_kernel_asked_for_by_name_runs_or_raises():
    with pytest.raises(ValueError, match="no kernel for platform 'cpu'; use 'auto' or 'reference'"):
        choose("pallas")
    with dispatch.interpret_kernels("tpu"):
        assert choose("pallas") == "tpu"
        with pytest.raises(NotImplementedError, match="tpu kernel does not take float64"):
            choose("pallas", supports=lambda kernel: "float64")


def test_unknown_backends_are_refused():
    # The annotation refuses it first where annotations are checked, as in these tests.
    with pytest.raises((ValueError, jaxtyping.TypeCheckError), match="'cuda'"):
        choose("cuda")


def test_the_reference_by_name_is_the_reference_everywhere(on_hopper):
    assert choose("reference", check=differ) == "reference"


@pytest.mark.usefixtures("on_hopper")
def test_auto_takes_the_kernel_of_the_device():
    assert choose("auto") == choose("pallas") == "gpu"


@pytest.mark.usefixtures("on_hopper")
def test_auto_takes_the_reference_of_operations_that_the_environment_names(monkeypatch):
    monkeypatch.setenv("PALLAS_KERNELS_REFERENCE", "slot_read,op")
    before = dispatch.decisions["op", "reference", "by PALLAS_KERNELS_REFERENCE"]
    assert choose("auto") == "reference"
    assert choose("pallas") == "gpu"
    assert dispatch.decisions["op", "reference", "by PALLAS_KERNELS_REFERENCE"] == before + 1
    monkeypatch.setenv("PALLAS_KERNELS_REFERENCE", "slot_read,operation")
    assert choose("auto") == "gpu"


@pytest.mark.usefixtures("on_hopper")
def test_auto_leaves_inputs_a_kernel_does_not_take_to_the_reference(caplog):
    for _ in range(2):
        assert choose("auto", supports=lambda kernel: f"float64 ({kernel})") == "reference"
    assert [r.getMessage() for r in caplog.records] == [
        "op runs its reference: the gpu kernel does not take float64 (gpu)."
    ]


def test_an_old_gpu_has_no_kernels(monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert choose("auto") == "reference"
    assert "compute capability unknown, only Hopper's 9.0" in caplog.text
    with pytest.raises(NotImplementedError, match="only Hopper"):
        choose("pallas")


@pytest.mark.usefixtures("on_hopper")
def test_a_kernel_that_fails_its_check_is_not_used(caplog):
    assert choose("auto", check=differ) == choose("auto", check=differ) == "reference"
    assert [r.getMessage() for r in caplog.records] == [
        "op runs its reference: the gpu kernel failed its check on this device: "
        "AssertionError: gpu is off by 3."
    ]
    with pytest.raises(RuntimeError, match="gpu is off by 3"):
        choose("pallas", check=differ)


@pytest.mark.usefixtures("on_hopper")
def test_the_check_runs_once_and_computes_inside_a_trace():
    ran = []

    def check(kernel):
        ran.append(float(jax.numpy.ones(3).sum()))  # A tracer has no float.

    def step(carry, x):
        assert choose("auto", check=check) == "gpu"
        return carry, x

    jax.jit(lambda x: jax.lax.scan(step, 0.0, x))(jax.numpy.ones(2))
    jax.jit(lambda x: jax.lax.scan(step, 0.0, x))(jax.numpy.ones(4))
    assert ran == [3.0]


@pytest.mark.usefixtures("on_hopper")
def test_a_check_that_runs_the_operation_by_name_checks_it_once(caplog):
    ran = []

    def check(kernel):
        ran.append(kernel)
        assert len(ran) == 1, "a check within a check"
        assert choose("pallas", check=check) == kernel
        assert choose("reference", check=check) == "reference"

    assert choose("auto", check=check) == "gpu"
    assert ran == ["gpu"]
    assert not caplog.records


@pytest.mark.usefixtures("on_hopper")
def test_interpreted_and_absent_devices_need_no_check():
    with dispatch.interpret_kernels("tpu"):
        assert choose("auto", check=differ) == "tpu"
        assert dispatch.interpreted()
    with dispatch.compile_kernels("gpu"):
        assert choose("auto", check=differ) == "gpu"
        assert not dispatch.interpreted()


def test_a_tpu_runs_its_kernel_and_a_gpu_operation_there_is_plain(monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert choose("auto") == choose("pallas") == "tpu"
    assert not caplog.records
    assert choose("auto", kernels=("gpu",)) == "reference"
    with pytest.raises(ValueError, match="no kernel for platform 'tpu'"):
        choose("pallas", kernels=("gpu",))


def test_contexts_retrace_what_was_compiled_outside():
    @jax.jit
    def chosen(x):
        return x + {"reference": 0, "tpu": 1, "gpu": 2}[choose("auto")]

    assert chosen(0) == 0
    with dispatch.default_backend("pallas"), dispatch.interpret_kernels("tpu"):
        assert chosen(0) == 1
    with dispatch.compile_kernels("gpu"):
        assert chosen(0) == 2
    assert chosen(0) == 0


def test_a_redirected_auto_still_leaves_what_kernels_do_not_take():
    with dispatch.default_backend("pallas"), dispatch.interpret_kernels("tpu"):
        assert choose("auto", supports=lambda kernel: "float64") == "reference"
    with dispatch.default_backend("reference"), dispatch.interpret_kernels("tpu"):
        assert choose("auto") == "reference"


def test_decisions_are_counted():
    before = dispatch.decisions["op", "reference", "by request"]
    choose("reference")
    assert dispatch.decisions["op", "reference", "by request"] == before + 1


@pytest.mark.parametrize("backend", ["auto", "pallas"])
def test_an_operation_without_a_kernel_for_the_simulated_device_is_plain_unless_named(backend):
    with dispatch.interpret_kernels("tpu"), dispatch.default_backend(backend):
        assert choose("auto", kernels=("gpu",)) == "reference"
        with pytest.raises(ValueError, match="has no kernel"):
            choose("pallas", kernels=("gpu",))
