"""Models of the Hugging Face Hub: fetched by name as a folder, and pushed under a name.

The package huggingface_hub (extra `hf`) does the work: its cache, its login, downloads that go on
after a lost connection. `HF_ENDPOINT` names another hub.
"""

import fnmatch
import glob
import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fwpkm_jax import __version__
from fwpkm_jax.data.streams.hub import (
    AGAIN,
    OTHER_HUB,
    asking,
    checked_commit,
    download,
    files_at,
    hub_client,
    is_commit,
    is_inside,
)
from fwpkm_jax.interchange.tensor_files import INDEX, SINGLE, named_files
from fwpkm_jax.io.atomic import replacing
from fwpkm_jax.io.untrusted import OutsideFileError, open_file, read_text, shown, without_login

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
DONE = "Models of the hub are fetched and pushed"
MOST_SMALL = 2**27
"""Bytes of a file that is not of weights, such as a tokenizer."""


class HubFolder:
    """A model of the hub at one commit, whose files are fetched into the client's cache.

    The commit and the list of files are asked for once. Where the hub cannot be asked, what is in
    the cache stands for them.

    Attributes:
      folder: with the fetched files.
      name: `owner/name`.
      revision: the commit, 40 hexadecimal digits.
      paths: files of the model, or of the cache, with their bytes; and SHA-256 where the hub states
        it.
    """

    def __init__(self, name: str, revision: str | None = None):
        """Asks for the commit and the list of files.

        Args:
          name: `owner/name`.
          revision: a branch, a tag or a commit; None: the main branch.

        Raises:
          ImportError: the package huggingface_hub is not installed.
          ValueError: the hub has no such model or revision.
          OutsideFileError: the hub's answer would lead outside the cache.
          OSError: the hub cannot be reached, or refuses.
        """
        self.name, self._client = name, hub_client(DONE)
        branch = "main" if revision is None else revision
        if not is_inside(branch):
            raise ValueError(f"revision={shown(branch)!r} is no branch, tag or commit.")
        cache = Path(self._client.constants.HF_HUB_CACHE).expanduser().resolve()
        cache /= f"models--{name.replace('/', '--')}"
        known = cache / "refs" / branch  # As the client keeps the commit of a branch.
        self._lost: Exception | None = None
        with asking(self._client, name, revision):
            api = self._client.HfApi(library_name="fwpkm_jax", library_version=__version__)
            try:
                commit = checked_commit(name, api.model_info(name, revision=branch).sha, branch)
                self.paths = {
                    x.path: (x.size, x.lfs.sha256 if x.lfs else None)
                    for x in files_at(self._client, api, name, commit, "model")
                }
            except (OutsideFileError, self._client.errors.RevisionNotFoundError):
                raise
            except Exception as error:
                commit = branch
                if not is_commit(branch) and known.is_file():
                    commit = read_text(known, most=100)
                if not is_commit(commit) or not (cache / "snapshots" / commit).is_dir():
                    raise
                self._lost = error
        self.revision, self.folder = commit, cache / "snapshots" / commit
        if self._lost is not None:
            files = (x for x in self.folder.rglob("*") if x.is_file())
            self.paths = {
                x.relative_to(self.folder).as_posix(): (x.stat().st_size, None) for x in files
            }
        elif not is_commit(branch):
            known.parent.mkdir(parents=True, exist_ok=True)
            with replacing(known) as file:
                file.write(commit.encode())

    def fetch(self, patterns: Iterable[str], *, most: float = math.inf) -> None:
        """Fetches the files that the model has of these; one that is in the cache stays.

        Args:
          patterns: of their paths.
          most: bytes of each.

        Raises:
          OutsideFileError: a file is not the one that the list of files states, or is too large.
          OSError: the hub cannot be reached, or refuses.
        """
        patterns = tuple(patterns)
        paths = [x for x in self.paths if any(fnmatch.fnmatchcase(x, y) for y in patterns)]
        for path in paths:
            if self.paths[path][0] > most:
                problem = f"has {self.paths[path][0]:,} bytes, and at most {most:,} are expected"
                raise OutsideFileError(f"{self.name}/{shown(path)}", problem, otherwise=OTHER_HUB)
        if self._lost is None:
            with asking(self._client, self.name, self.revision), ThreadPoolExecutor(8) as threads:
                list(threads.map(self._fetch, paths))

    def check_asked(self) -> None:
        """Raises OSError if the hub could not be asked: a missing file is then one of the cache."""
        if self._lost is not None:
            with asking(self._client, self.name, self.revision):
                raise self._lost

    def _fetch(self, path: str) -> None:
        size, stated = self.paths[path]
        found = download(self._client, self.name, path, self.revision, "model", size=size)
        if found != self.folder / path:
            problem = f"is of another commit than {self.revision} at this hub"
            raise OutsideFileError(f"{self.name}/{shown(path)}", problem, otherwise=OTHER_HUB)
        if stated is None:
            return
        with open_file(found) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != stated:
            blob = found.resolve()
            for kept in {found, blob} if blob.is_relative_to(self.folder.parents[1]) else {found}:
                kept.unlink()  # Or it would be taken from the cache.
            problem = f"has the SHA-256 {digest}, and the hub states {shown(stated, 64)}"
            raise OutsideFileError(f"{self.name}/{shown(path)}", problem, otherwise=AGAIN)


def fetch_folder(
    name: str, *, revision: str | None = None, others: Sequence[str] = ()
) -> HubFolder:
    """Fetches what an import reads: `config.json`, the safetensors files, and small files.

    All files are of one commit. Files that are in the cache are not fetched again, also without a
    connection.

    Args:
      name: `owner/name`.
      revision: a branch, a tag or a commit; None: the main branch.
      others: names of small files that are fetched where the model has them.

    Raises:
      ImportError: the package huggingface_hub is not installed.
      ValueError: the hub has no such model or revision, or the model has no safetensors files.
      OutsideFileError: the index of the safetensors files is damaged, or the hub's answers are not
        what they should be.
      OSError: the hub cannot be reached, or refuses.
    """
    model = HubFolder(name, revision)
    model.fetch(map(glob.escape, ["config.json", INDEX, *others]), most=MOST_SMALL)
    if SINGLE in model.paths:  # As `TensorFiles` chooses.
        weights = {SINGLE}
    elif INDEX in model.paths:
        weights = set(named_files(model.folder).values())
    else:
        weights = set()
    if not weights <= model.paths.keys() or not weights:
        model.check_asked()
    if not weights:
        raise ValueError(
            f"{name} at {model.revision} has neither {SINGLE} nor {INDEX}; only models with "
            "safetensors files can be imported."
        )
    model.fetch(map(glob.escape, sorted(weights)))
    return model


def check_push(name: str) -> None:
    """Raises unless a folder can be pushed under this name; asks the hub who is logged in.

    Raises:
      ImportError: the package huggingface_hub is not installed.
      ValueError: the name is not `owner/name`.
      OSError: nobody is logged in, or the hub cannot be reached.
    """
    if NAME.fullmatch(name) is None:
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
    return without_login(shown(commit.commit_url))
