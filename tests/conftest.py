"""Options and settings that every test shares."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        metavar="DIR",
        default=None,
        help="folder of reference vectors for tests/golden (default: ../shared/golden beside the "
        "repository; its tests are skipped where that is absent)",
    )
