"""Runs every golden test over every file of its kind, in float64 and in float32.

Part of the default run is the first file of a kind in float64. Files and dtypes add mathematics,
which float64 tells more sharply: `-m slow` runs the other files, and all of them in float32;
`--golden-dir` runs everything.

A module states `KIND = "attention"`; its tests take the fixtures `golden_path` (one file
`attention_*.npz`) and `dtype` (what to compute in, with float64 switched on where needed).
"""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

BY_DEFAULT = {"float64": 1, "float32": 0}
"""Files of a kind that are not slow."""
DEFAULT_DIR = Path(__file__).parents[2].parent / "shared" / "golden"


def _golden_dir(config: pytest.Config) -> Path:
    """The folder asked for, which must exist, or the default one, which may be absent."""
    chosen = config.getoption("--golden-dir")
    if chosen is None:
        return DEFAULT_DIR
    if not Path(chosen).is_dir():
        raise pytest.UsageError(f"--golden-dir={chosen} is not a folder; name an existing one.")
    return Path(chosen)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden_path" in metafunc.fixturenames:
        kind = metafunc.module.KIND
        folder = _golden_dir(metafunc.config)
        # Names end in a number: "fwpkm_*" would also find other kinds that begin so.
        paths: list = sorted(folder.glob(f"{kind}_[0-9]*.npz"))
        ids = [path.stem for path in paths]
        if not paths:
            reason = f"no {kind}_*.npz in {folder}; choose a folder with --golden-dir"
            paths, ids = [pytest.param(None, marks=pytest.mark.skip(reason=reason))], ["absent"]
        metafunc.parametrize("golden_path", paths, ids=ids)
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", ["float64", "float32"], indirect=True)


@pytest.hookimpl(tryfirst=True)  # Before -m chooses.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of all files but the first one of each kind as slow.

    Those of published code, which have no file of that folder, are slow in float32.

    Not where a folder is asked for: then all of it is run.
    """
    if config.getoption("--golden-dir") is not None:
        return
    seen: dict[tuple[str, str], list[object]] = {}
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if "golden_path" not in parameters:
            if parameters.get("dtype") == "float32":
                item.add_marker(pytest.mark.slow)
            continue
        path, dtype = parameters["golden_path"], parameters.get("dtype", "float64")
        files = seen.setdefault((item.nodeid.split("[")[0], dtype), [])
        if path not in files:
            files.append(path)
        if files.index(path) >= BY_DEFAULT[dtype]:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def dtype(request: pytest.FixtureRequest) -> Iterator[np.dtype]:
    """The dtype to compute in; matrix products are exact to it while the test runs."""
    chosen = np.dtype(request.param)
    with jax.enable_x64(chosen == np.float64), jax.default_matmul_precision("highest"):
        yield chosen
