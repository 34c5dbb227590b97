"""Starts a run from a checkpoint of the authors' release, here or on the hub."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from fwpkm_jax.config import Experiment, load_config
from fwpkm_jax.interchange.hf.imported import (
    HUB,
    SMALL_FILES,
    copy_small_files,
    fetched,
    first_data,
)
from fwpkm_jax.interchange.imported_run import check_empty, start_run
from fwpkm_jax.io.atomic import check_local, write_json
from fwpkm_jax.io.untrusted import read_json, reading
from fwpkm_jax.paper.release.conversion import read_release
from fwpkm_jax.paper.release.fetching import fetch_release
from fwpkm_jax.paper.release.release_config import release_config
from fwpkm_jax.storage.addresses import address_of

KEPT = "release"
"""Folder in the run: `config.json` and tokenizer of the checkpoint; its name and commit where it
came from the hub."""
_CONFIG = "config.json"


def import_release(
    source: str | Path,
    run_dir: str | Path,
    *,
    config: str | None = None,
    revision: str | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Starts a run whose step 0 is a checkpoint of the authors' release.

    Args:
      source: a file or folder in one of the layouts of `layouts`; or `owner/name` of a model
        on the Hugging Face Hub, whose commit the run keeps in `release/hub.json`.
      run_dir: a new directory, also in a bucket.
      config: name or file of a config of the trained model; the run gets its data and training
        too. None: the `config.json` in the folder or beside the file describes the model; the run
        then trains on this package's sample of text until `--data.train_paths` names another.
      revision: of a model on the hub: branch, tag or commit; None: the main branch.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: see `read_release` and `release_config`; or the directory is not empty; or the hub
        has no such model.
      ImportError: a name of the hub needs the extra `hf`.
      OSError: the hub cannot be reached, or refuses.
    """
    run = Path(run_dir)
    check_empty(run)
    fetch = partial(fetch_release, others=SMALL_FILES)
    source, name_of = fetched(source, fetch, revision=revision, say=say)
    check_local(source)
    folder = source if source.is_dir() else source.parent
    if config is not None:
        experiment = replace(load_config(config), run_dir=address_of(run))
        weights = read_release(source, experiment.model)
    else:
        path = folder / _CONFIG
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist, which would say what model {source} holds; put it there, "
                "or name the config that was trained by --config."
            )
        values = read_json(path, otherwise="fetch it again", kind=dict)
        with reading(path, problem="cannot be imported", otherwise="name a config by --config"):
            model = release_config(values)
        weights = read_release(source, model)
        data = first_data(folder, run / KEPT, model, say)
        experiment = Experiment(model=model, data=data, run_dir=address_of(run))

    def keep(new: Path) -> None:
        copy_small_files(folder, new / KEPT)
        if (folder / _CONFIG).is_file():
            shutil.copyfile(folder / _CONFIG, new / KEPT / _CONFIG)
        if name_of:
            write_json(new / KEPT / HUB, name_of)

    return start_run(experiment, weights, add=keep)
