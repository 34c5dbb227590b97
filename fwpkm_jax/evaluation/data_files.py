"""Files that evaluations read, named by a path of this machine or of a data set of the hub."""

from __future__ import annotations

from pathlib import Path

from fwpkm_jax.addresses import scheme_of
from fwpkm_jax.data.documents import PACKAGED, find_files
from fwpkm_jax.data.streams.hub import HUB, HubName, asking, check_hub_name, fetch_file, hub_client


def local_path(name: str) -> Path:
    """The file or folder of a path; one of the hub's is fetched into its client's cache.

    Args:
      name: a path, `package:sample/...` of this package, or
        `hf://datasets/OWNER/NAME[@REVISION]/PATH` with the path of a file or folder.

    Raises:
      FileNotFoundError: there is no such path here.
      ImportError: the package huggingface_hub is not installed.
      ValueError: an address of another form, or the hub has no such data set, revision or path.
      OSError: the hub cannot be reached, or refuses.
    """
    if name.startswith(PACKAGED):
        return find_files(name)[0]
    scheme = scheme_of(name)
    if scheme == HUB:
        return _fetched(name)
    if scheme is not None:
        raise ValueError(
            f"{name} is neither a path of this machine nor hf://datasets/OWNER/NAME/PATH; copy it "
            "here first."
        )
    path = Path(name).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"There is no file or folder {path.absolute()}; check the path.")
    return path


def _fetched(address: str) -> Path:
    wanted, part = check_hub_name(address)
    client = hub_client("Data sets of the hub are fetched")
    api = client.HfApi(library_name="fwpkm_jax")
    with asking(client, wanted.name, wanted.revision, what="data set"):
        commit = str(api.dataset_info(wanted.name, revision=wanted.revision).sha)
        entries = api.list_repo_tree(
            wanted.name, repo_type="dataset", revision=commit, recursive=True
        )
        paths = [one.path for one in entries if isinstance(one, client.hf_api.RepoFile)]
    repository = HubName(wanted.name, commit)
    if part in paths:
        return fetch_file(repository, part)
    below = [path for path in paths if part and path.startswith(f"{part}/")]
    if not below:
        raise ValueError(f"{repository} has no file or folder {part!r}; check the path.")
    files = [fetch_file(repository, path) for path in below]
    # A file lies as deep below the data set's folder as its path has parts.
    return files[0].parents[len(Path(below[0]).parts) - 1] / part
