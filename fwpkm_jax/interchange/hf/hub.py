"""Models of the Hugging Face Hub: fetched by name as a folder, and pushed under a name.

The package huggingface_hub (extra `hf`) does the work: its cache, its login, downloads that go on
after a lost connection. `HF_ENDPOINT` names another hub.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fwpkm_jax import __version__
from fwpkm_jax.data.streams.hub import asking, hub_client
from fwpkm_jax.interchange.tensor_files import INDEX, SINGLE, named_files
from fwpkm_jax.io.untrusted import shown

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
DONE = "Models of the hub are fetched and pushed"


class HubFolder(NamedTuple):
    """A model of the hub as it lies in the client's cache.

    Attributes:
      folder: with the fetched files.
      name: `owner/name`.
      revision: the commit, 40 hexadecimal digits.
    """

    folder: Path
    name: str
    revision: str


def is_hub_name(source: str | Path) -> bool:
    """Whether a source is `owner/name` and no folder here."""
    return _NAME.fullmatch(str(source)) is not None and not Path(source).exists()


def fetch_folder(
    name: str, *, revision: str | None = None, others: Sequence[str] = ()
) -> HubFolder:
    """Fetches what an import reads: `config.json`, the safetensors files, and small files.

    The revision is resolved once, so that all files are of one commit. Files that are in the cache
    are not fetched again, also without a connection.

    Args:
      name: `owner/name`.
      revision: a branch, a tag or a commit; None: the main branch.
      others: names of small files that are fetched where the model has them.

    Raises:
      ImportError: the package huggingface_hub is not installed.
      ValueError: the hub has no such model or revision, or the model has no safetensors files.
      OutsideFileError: the index of the safetensors files is damaged.
      OSError: the hub cannot be reached, or refuses.
    """
    client = hub_client(DONE)

    def fetch(revision: str | None, files: Sequence[str]) -> Path:
        return fetch_files(client, name, revision, [glob.escape(file) for file in files])

    folder = fetch(revision, ["config.json", INDEX, *others])
    commit = folder.name  # A snapshot's folder is named after its commit.
    # With a file that is there, because the client warns where nothing fits.
    fetch(commit, ["config.json", SINGLE])
    if not (folder / SINGLE).is_file():  # As `TensorFiles` chooses.
        if not (folder / INDEX).is_file():
            raise ValueError(
                f"{name} at {commit} has neither {SINGLE} nor {INDEX}; only models with "
                "safetensors files can be imported."
            )
        fetch(commit, ["config.json", *sorted(set(named_files(folder).values()))])
    return HubFolder(folder, name, commit)


def fetch_files(client: Any, name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The folder of the cache in which the files of these patterns lie."""
    with asking(client, name, revision):
        folder = client.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            library_name="fwpkm_jax",
            library_version=__version__,
        )
    return Path(folder)


def check_push(name: str) -> None:
    """Raises unless a folder can be pushed under this name; asks the hub who is logged in.

    Raises:
      ImportError: the package huggingface_hub is not installed.
      ValueError: the name is not `owner/name`.
      OSError: nobody is logged in, or the hub cannot be reached.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"push={shown(name)!r} is no name of the hub; write owner/name.")
    client = hub_client(DONE)
    with asking(client, name, None):
        client.HfApi().whoami()


def push_folder(folder: Path, name: str, *, private: bool = False) -> str:
    """Pushes an exported folder as one commit and returns the commit's address.

    The repository is made if it is not there. Weights of an earlier push that the folder does not
    have are deleted by the same commit; other files of the repository stay.

    Args:
      folder: from `export_model`.
      name: `owner/name`.
      private: whether a repository that is made can be seen by its owner alone.

    Raises:
      ImportError: the package huggingface_hub is not installed.
      OSError: nobody is logged in, the login may not write there, or the hub cannot be reached.
    """
    client = hub_client(DONE)
    api = client.HfApi(library_name="fwpkm_jax", library_version=__version__)
    with asking(client, name, None):
        api.create_repo(name, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message=f"Exported by fwpkm_jax {__version__}",
            delete_patterns=["*.safetensors", "*.safetensors.index.json"],
        )
    return str(commit.commit_url)
