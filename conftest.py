"""Options and settings that every test shares."""

import contextlib
import gc
import os
from importlib.metadata import version

# Before JAX starts. On a CPU tests compile far more than they compute.
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith("0.10."):
    # Halves the time to compile; later versions do not know it and stop at unknown flags.
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"
if os.environ.setdefault("JAX_PLATFORMS", "cpu") == "cpu":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
os.environ.setdefault("FWPKM_JAX_CACHE", "off")  # Tests leave the user's folders alone.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # Lines of Python in each operation.

from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

from pallas_kernels import dispatch  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

# A bare machine with a GPU runs tests/kernels without hypothesis.
with contextlib.suppress(ModuleNotFoundError):
    import hypothesis

    # Compilation makes the first example slow; a failing example must be the same on every machine.
    hypothesis.settings.register_profile(
        "fwpkm", deadline=None, derandomize=True, max_examples=10, database=None
    )
    hypothesis.settings.load_profile("fwpkm")

# Traces leave many live objects, which the collector would visit again and again.
gc.set_threshold(50_000)

_MAX_MAPS = 20_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        metavar="DIR",
        default=None,
        help="folder of reference vectors for tests/golden (default: ../shared/golden beside the "
        "repository; its tests are skipped where that is absent)",
    )
    parser.addoption(
        "--backend",
        choices=["auto", "pallas"],
        default="auto",
        help="pallas: run every test over the kernels, by interpretation where their device is not",
    )
    parser.addoption(
        "--kernels",
        choices=["tpu", "gpu"],
        default="tpu",
        help="whose kernels --backend pallas interprets (default: tpu)",
    )
    parser.addoption(
        "--plain-scan",
        action="store_true",
        help="run every FwPKM memory as a scan of its steps, but for the tests of the two phases",
    )
    parser.addoption(
        "--installed",
        action="store_true",
        help="a test that would be skipped for want of a package fails",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Neighbouring tests to the same worker, which then compiles what they share only once."""
    if config.getoption("dist") != "load":  # Another way was asked for.
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # Before -m chooses.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_cases(items, whole_files=not any("::" in name for name in config.args))
    left_out = set()
    if config.getoption("--plain-scan"):
        left_out.add("two_phase")
    if config.getoption("--backend") != "auto":
        left_out.add("compiled_text")  # Kernels' interpreters copy what the kernels do not.
    if left_out:
        kept = [i for i in items if not any(i.get_closest_marker(name) for name in left_out)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if report.skipped and item.config.getoption("--installed"):
        reason = report.longrepr[2]
        if "not installed" in reason or "could not import" in reason:
            report.outcome, report.longrepr = "failed", f"{item.nodeid}: {reason}"
    return report


def _mark_cases(items: list[pytest.Item], *, whole_files: bool) -> None:
    """Marks the cases that a mark does not name: `by_default`, thorough; `thorough`, slow.

    `by_default(..., thorough=[...])` names both, and the others are slow. `slow_cases` marks those
    that it names. With whole files, marks must name real cases.
    """
    unknown: dict[tuple[str, str], set[str]] = {}
    for item in items:
        for name, adds, to_named in (
            ("by_default", "thorough", False),
            ("thorough", "slow", False),
            ("slow_cases", "slow", True),
        ):
            mark = item.get_closest_marker(name)
            if mark is None or not mark.args:
                continue
            case = item.callspec.id  # pyright: ignore[reportAttributeAccessIssue]
            if case == "NOTSET":  # The data of which the cases are is not here.
                continue
            test = item.nodeid.removesuffix(f"[{case}]")
            further = mark.kwargs.get("thorough")
            named = {*mark.args, *(further or ())}
            unknown.setdefault((test, name), named).discard(case)
            if (case in mark.args) == to_named:
                item.add_marker(adds if further is None or case in further else "slow")
    for (test, name), cases in unknown.items():
        if cases and whole_files:
            raise pytest.UsageError(f"{test}: {name} names {sorted(cases)}, which are no cases.")


@pytest.fixture(scope="session", autouse=True)
def _plain_scan(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--plain-scan"):
            from fwpkm_jax.rules import FwPKM  # Not before its annotations are being checked.

            patch.setattr(FwPKM, "two_phase", property(lambda rule: False))
        yield


@pytest.fixture(scope="session", autouse=True)
def _backend(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.config.getoption("--backend") == "auto":
        yield
        return
    with dispatch.default_backend("pallas"):
        if jax.default_backend() != "cpu":
            yield
            return
        with dispatch.interpret_kernels(request.config.getoption("--kernels")):
            yield


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Says which operations ran their kernels, so that a fallback cannot pass for a parity."""
    if config.getoption("--backend") == "auto":
        return
    terminalreporter.section("implementations traced (of this process)")
    for (op, chosen, reason), count in sorted(dispatch.decisions.items()):
        terminalreporter.line(f"{op}: {chosen} {count} times ({reason})")


@pytest.fixture
def float64() -> Iterator[None]:
    """Doubles, while the test runs."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def without_type_checks() -> Iterator[None]:
    """As users run the library: without jaxtyping's checks, which come before its own."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module", autouse=True)
def _release_compiled_code() -> Iterator[None]:
    """Drops compiled functions before the process runs out of memory maps.

    Each takes about four, Linux allows 65,530 per process, and beyond them the compiler crashes.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MAX_MAPS:
        jax.clear_caches()
