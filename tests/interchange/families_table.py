"""How far our logits are from the library's, for the table in docs/howto/open_models.md.

python -m tests.interchange.families_table
"""

import tempfile
from pathlib import Path

import jax
import numpy as np

from tests.interchange.make_families import MODELS, write_model
from tests.interchange.test_hf import FOLDERS, largest_difference, passes
from tests.interchange.test_hf_families import KNOWN, compared


def _of_folder(folder: Path) -> tuple[float, float]:
    """Differences of a folder in `../shared/hf`, which has the library's logits beside it."""
    expected = np.load(folder / "expected.npz")
    with jax.default_matmul_precision("highest"):
        whole, padded = passes(folder, expected, streamed=False)
    largest, real = np.max(np.abs(expected["logits"])), expected["mask"] > 0
    left = expected.get("logits_left_padded")
    behind = float("nan") if left is None else largest_difference(padded[real], left[real])
    return largest_difference(whole, expected["logits"]) / largest, behind / largest


def main() -> None:
    for folder in FOLDERS:
        whole, padded = _of_folder(folder)
        print(f"{folder.name}: {whole:.1e} {padded:.1e}", flush=True)
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            known = KNOWN["models"][name]
            write_model(Path(folder) / "model", known["config"], known["tensors"])
            whole, padded = compared(Path(folder) / "model", name, streamed=False)
            print(f"{name}: {whole:.1e} {padded:.1e}", flush=True)


if __name__ == "__main__":
    main()
