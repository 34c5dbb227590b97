"""Options and settings that every test shares."""

import os

# Before JAX starts: tests compile far more than they compute.
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation makes the first example slow; a failing example must be the same on every machine.
hypothesis.settings.register_profile(
    "fwpkm", deadline=None, derandomize=True, max_examples=10, database=None
)
hypothesis.settings.load_profile("fwpkm")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        metavar="DIR",
        default=None,
        help="folder of reference vectors for tests/golden (default: ../shared/golden beside the "
        "repository; its tests are skipped where that is absent)",
    )
