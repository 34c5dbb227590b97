"""Starts a run from a folder of the transformers library."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from fwpkm_jax.config import Experiment
from fwpkm_jax.data import AbstractDataConfig, RecallData, TextData, sample
from fwpkm_jax.data.tokenizers import BYTES, ByteTokenizer, load_tokenizer
from fwpkm_jax.interchange.hf.hub import MOST_SMALL, NAME, HubFolder, fetch_folder
from fwpkm_jax.interchange.hf.layout import plain_name
from fwpkm_jax.interchange.hf.model_folder import (
    HEAD,
    MEMORIES,
    NOTE,
    ModelFolder,
    ParameterDtype,
    Tensors,
    open_folder,
    read_weights,
)
from fwpkm_jax.interchange.imported_run import check_empty, start_run
from fwpkm_jax.io.atomic import write_json
from fwpkm_jax.io.untrusted import OutsideFileError, read_bytes
from fwpkm_jax.layers.partition import MeshConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.run.load import IMPORTED
from fwpkm_jax.storage.addresses import address_of
from fwpkm_jax.training.sharding import make_partition

KEPT, TENSORS, HUB = IMPORTED, "tensors.json", "hub.json"
"""Folder in the run with what an export needs again: configuration, tokenizer, tensors' dtypes; and
the model's name and commit where it came from the hub."""
TOKENIZER = "tokenizer.json"
SMALL_FILES = (
    TOKENIZER,
    *("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    "generation_config.json",
)


def import_model(
    folder: str | Path,
    run_dir: str | Path,
    *,
    dtype: ParameterDtype | None = None,
    mesh: MeshConfig | None = None,
    revision: str | None = None,
    files: Tensors | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Starts a run whose step 0 is the model of a folder; needs neither torch nor transformers.

    The run trains on this package's sample of text until `--data.train_paths` names another;
    without a `tokenizer.json` in the folder, on bytes, or on generated facts where the vocabulary
    is too small for them.

    Args:
      folder: as the transformers library saves it; or `owner/name` of a model on the Hugging Face
        Hub, whose commit the run keeps in `hub.json` beside its other imported files.
      run_dir: a new directory, also in a bucket.
      dtype: of the matrices; None: as they are stored.
      mesh: devices that the weights are read onto; the run's own.
      revision: of a model on the hub: branch, tag or commit; None: the main branch.
      files: the tensors, where they are not in the folder.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: see `open_folder`; or the directory is not empty; or the hub has no such model.
      ImportError: a name of the hub needs the extra `hf`.
      OSError: the hub cannot be reached, or refuses.
    """
    run = Path(run_dir)
    check_empty(run)
    fetch = partial(fetch_folder, others=(*SMALL_FILES, MEMORIES))
    folder, name_of = fetched(folder, fetch, revision=revision, say=say)
    source = open_folder(folder, dtype=dtype, files=files)
    for what, number in source.left_out.items():
        say(f"Left out: {number} tensors of the {what}, for which this package has no place.")
    mesh = MeshConfig() if mesh is None else mesh
    experiment = Experiment(
        model=source.config,
        data=first_data(folder, run / KEPT, source.config, say),
        mesh=mesh,
        run_dir=address_of(run),
    )
    weights = read_weights(source, partition=make_partition(mesh))

    def keep(new: Path) -> None:
        _keep_files(folder, new / KEPT, source)
        if name_of:
            write_json(new / KEPT / HUB, name_of)

    return start_run(experiment, weights, add=keep)


def fetched(
    source: str | Path,
    fetch: Callable[..., HubFolder],
    *,
    revision: str | None,
    say: Callable[[str], None],
) -> tuple[Path, dict[str, str]]:
    """Where a model lies, and its name and commit on the hub; `{}` for a path of this machine.

    Args:
      source: a path, or `owner/name` of a model on the hub, which is fetched.
      fetch: fetches it, as `fetch_folder`.
      revision: branch, tag or commit on the hub.

    Raises:
      ValueError: a revision is given for a path. See also `fetch_folder`.
    """
    if NAME.fullmatch(str(source)) and not Path(source).exists():
        found = fetch(str(source), revision=revision)
        say(f"Fetched {found.name} at {found.revision}.")
        return found.folder, {"name": found.name, "revision": found.revision}
    if revision is not None:
        raise ValueError(
            f"revision={revision!r} is of a model on the hub, and {source} is a path here; leave "
            "it out, or name the model as owner/name."
        )
    return Path(source), {}


def first_data(
    folder: Path, kept: Path, model: ModelConfig, say: Callable[[str], None]
) -> AbstractDataConfig:
    """What an imported run trains on until other text is named.

    Args:
      folder: of the model, which may have a tokenizer.
      kept: where the run will keep the tokenizer. In a bucket the run names its address, so that
        it is found from any machine.

    Raises:
      OutsideFileError: the tokenizer is not the model's, or is damaged.
    """
    if (folder / TOKENIZER).is_file():
        _check_tokenizer(folder, model, say)
        tokenizer = address_of(kept / TOKENIZER)
    elif model.vocab_size >= ByteTokenizer.vocab_size:
        say(
            f"{folder} has no {TOKENIZER}; the run reads text as bytes, which the model may not "
            "know. If it has a tokenizer, add the file and import again."
        )
        tokenizer = BYTES
    else:
        tokens = model.vocab_size // 3
        say(
            f"{folder} has no {TOKENIZER}; until it is added and imported again, the run reads "
            "generated facts and no text."
        )
        return RecallData(
            num_filler=tokens, num_keys=tokens, num_values=tokens, num_facts=min(16, tokens)
        )
    return TextData(
        train_paths=(str(sample.TRAIN),),
        valid_paths=(str(sample.VALID),),
        length=512,
        tokenizer=tokenizer,
    )


def _check_tokenizer(folder: Path, model: ModelConfig, say: Callable[[str], None]) -> None:
    """Refuses a tokenizer whose ids the embedding does not have.

    Raises:
      OutsideFileError: an id is too large, or the file is no tokenizer.
    """
    path, rows = folder / TOKENIZER, model.vocab_size
    try:
        tokens = load_tokenizer(str(path)).vocab_size
    except ImportError as error:
        say(f"{path} is not looked at: {error}.")
        return
    if tokens > rows:
        problem = f"has ids up to {tokens - 1}, and the embedding beside it has {rows} rows"
        raise OutsideFileError(
            path, problem, otherwise="take the tokenizer and the weights of one model"
        )


def copy_small_files(folder: Path, kept: Path) -> None:
    """Keeps a model's tokenizer and settings of generation, as far as there are any.

    Raises:
      OutsideFileError: one is too large, or a link out of the folder; an export would pass on what
        it leads to.
    """
    kept.mkdir()
    for name in SMALL_FILES:
        if (folder / name).is_file():
            _check_inside(folder / name)
            (kept / name).write_bytes(read_bytes(folder / name, most=MOST_SMALL))


def _check_inside(path: Path) -> None:
    """Refuses a link out of a folder; of a model in the hub's cache, out of `models--OWNER--NAME`,
    whose snapshots are links.
    """
    folder = path.parent.resolve()
    home = folder.parents[1] if folder.parent.name == "snapshots" else folder
    if not path.resolve().is_relative_to(home):
        problem = "is a link out of its folder"
        raise OutsideFileError(path, problem, otherwise="put what it names in its place")


def _keep_files(folder: Path, kept: Path, source: ModelFolder) -> None:
    """Copies what is small, and writes down what the tensors were."""
    _check_inside(folder / "config.json")
    copy_small_files(folder, kept)
    exported = {NOTE, "auto_map"} if NOTE in source.text else set()  # An export writes its own.
    text = {key: value for key, value in source.text.items() if key not in exported}
    write_json(kept / "config.json", text)
    stored = ((name, source.files[inside]) for name, inside in source.stored.items())
    tensors = {name: {"dtype": x.dtype, "shape": list(x.shape)} for name, x in stored}
    for name, x in source.files.items():
        if plain_name(name) == HEAD:  # A tied one too.
            tensors[HEAD] = {"dtype": x.dtype, "shape": list(x.shape)}
    write_json(kept / TENSORS, tensors)
