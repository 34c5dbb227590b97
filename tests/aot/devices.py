"""The absent devices of `benchmarks.compiled`; a test is skipped where the compiler is missing."""

from typing import Any

import pytest

from benchmarks.compiled import absent_devices


def absent_device(device: str) -> Any:
    """A device to give argument shardings; skips the test where its compiler is not installed."""
    try:
        return absent_devices.absent_device(device)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
