"""Runs every golden test over every file of its kind, in float64 and in float32.

In float32 only the first file of a kind is part of the default run: what the others add is
mathematics, which float64 tells more sharply. `--golden-dir` and `-m slow` run the rest.

A module states `KIND = "attention"`; its tests take the fixtures `golden_path` (one file
`attention_*.npz`) and `dtype` (what to compute in, with float64 switched on where needed).
"""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests in float32 of all files but the first of each kind as slow.

    Not where a folder is asked for: then all of it is.
    """
    if config.getoption("--golden-dir") is not None:
        return
    seen: dict[str, object] = {}
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if parameters.get("dtype") != "float32" or "golden_path" not in parameters:
            continue
        path, test = parameters["golden_path"], item.nodeid.split("[")[0]
        if seen.setdefault(test, path) != path:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def dtype(request: pytest.FixtureRequest) -> Iterator[np.dtype]:
    """The dtype to compute in; matrix products are exact to it while the test runs."""
    chosen = np.dtype(request.param)
    with jax.enable_x64(chosen == np.float64), jax.default_matmul_precision("highest"):
        yield chosen
