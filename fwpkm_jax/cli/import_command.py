"""`fwpkm import weights FOLDER RUN`, `release CHECKPOINT RUN`, `hf FOLDER RUN`, `gguf FILE RUN`.

Each starts a run from existing weights; `fwpkm train --resume RUN` continues its training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from fwpkm_jax.cli.options import FolderArgument, PluginOptions, RunArgument, parse_options
from fwpkm_jax.interchange import read_folder, start_run
from fwpkm_jax.interchange.gguf import import_gguf
from fwpkm_jax.interchange.hf import import_model
from fwpkm_jax.interchange.hf.model_folder import ParameterDtype
from fwpkm_jax.interchange.imported_run import check_empty
from fwpkm_jax.io.status_line import progress_shown
from fwpkm_jax.layers.partition import MeshConfig
from fwpkm_jax.storage.addresses import address_of
from fwpkm_jax.storage.sync import fetched


@dataclass(frozen=True, kw_only=True)
class ImportWeights(PluginOptions):
    """Starts a run from a folder that `fwpkm export` wrote."""

    folder: FolderArgument
    """The exported folder. It may lie in a bucket."""
    run: RunArgument
    """New run directory. It may lie in a bucket."""

    def start(self) -> None:
        check_empty(self.run)
        with fetched(self.folder) as folder:
            experiment, weights = read_folder(folder)
            start_run(replace(experiment, run_dir=address_of(self.run)), weights)


@dataclass(frozen=True, kw_only=True)
class ImportRelease(PluginOptions):
    """Starts a run from a checkpoint of the authors' release."""

    checkpoint: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
    """A folder or file that the authors' code has written: safetensors, pytorch_model.bin, shards
    with their index, DeepSpeed's mp_rank_00_model_states.pt; or owner/name of a model on the
    Hugging Face Hub."""
    run: RunArgument
    """New run directory. It may lie in a bucket."""
    config: str | None = None
    """Config of the trained model: a shipped config's name, such as gdn_swa__fwpkm2_6_10, or a
    file. None: the config.json beside the checkpoint says it."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub. None: its main branch. The run keeps the
    commit."""

    def start(self) -> None:
        from fwpkm_jax.paper.release import import_release

        import_release(self.checkpoint, self.run, config=self.config, revision=self.revision)


@dataclass(frozen=True, kw_only=True)
class ImportHF:
    """Starts a run from a folder of the transformers library."""

    folder: FolderArgument
    """The folder, with config.json and safetensors files, also in a bucket; or owner/name of a
    model on the Hugging Face Hub, which is fetched into its client's cache. Families: Llama 3,
    Mistral, Qwen2.5, Qwen3, Qwen3.5, Qwen3-Next, SmolLM3, OLMo 2, 3 and Hybrid, Gemma 3; of models
    of images, the text part."""
    run: RunArgument
    """New run directory. It may lie in a bucket."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub. None: its main branch. The run keeps the
    commit."""
    dtype: ParameterDtype | None = None
    """Dtype of the matrices. None: bfloat16 if all are stored in bfloat16, otherwise float32."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """The devices that the weights are read onto; each device reads its part only."""

    def start(self) -> None:
        check_empty(self.run)
        with fetched(self.folder) as folder:
            import_model(folder, self.run, dtype=self.dtype, mesh=self.mesh, revision=self.revision)


@dataclass(frozen=True, kw_only=True)
class ImportGGUF:
    """Starts a run from a model in one GGUF file, whose weights become float32."""

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """The file, with its tokenizer: Llama 2 and 3, Mistral, SmolLM2, Qwen2 and Qwen3."""
    run: RunArgument
    """New run directory. It may lie in a bucket."""
    dtype: ParameterDtype | None = None
    """Dtype of the matrices. None: float32."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """The devices that the weights are read onto; each device reads its part only."""

    def start(self) -> None:
        check_empty(self.run)
        import_gguf(self.file, self.run, dtype=self.dtype, mesh=self.mesh)


_Source = (
    Annotated[ImportWeights, tyro.conf.subcommand("weights")]
    | Annotated[ImportRelease, tyro.conf.subcommand("release")]
    | Annotated[ImportHF, tyro.conf.subcommand("hf")]
    | Annotated[ImportGGUF, tyro.conf.subcommand("gguf")]
)


def main(arguments: Sequence[str], program: str = "fwpkm import") -> int:
    """Imports weights as a new run; returns the program's exit code."""
    source = parse_options(_Source, arguments, program, addresses=("folder", "run"))
    with progress_shown(f"Reading weights and writing {address_of(source.run)} ..."):
        source.start()
    print(f"wrote {address_of(source.run)}")
    return 0
