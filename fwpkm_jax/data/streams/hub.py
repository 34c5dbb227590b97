"""Data sets of the Hugging Face Hub: their files listed, and fetched one by one.

The package huggingface_hub (extra `hf`) does the work: its cache, its login, downloads that go on
after a lost connection. `HF_ENDPOINT` names another hub.
"""

import contextlib
import contextvars
import functools
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fwpkm_jax.io.untrusted import OutsideFileError, shown, without_login
from fwpkm_jax.lazy_imports import import_extra

HUB = "hf"
"""The scheme of addresses of the hub."""

LOGIN = "log in with `hf auth login`"
OTHER_HUB = "name another hub in HF_ENDPOINT"
AGAIN = "run the command again: files that are whole are not fetched again"
_FORM = f"{HUB}://datasets/OWNER/NAME[@REVISION][/FILE, FOLDER OR PATTERN]"
_ADDRESS = re.compile(
    rf"{HUB}://datasets/([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([^/]+))?(?:/(.+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MOST_FILES = 200_000
"""Of a repository; the hub advises against more than half of them."""
_MOST_BYTES = 2**25
"""Of an answer that is no file; and of a file for which the hub states fewer."""
_most: contextvars.ContextVar[int] = contextvars.ContextVar("bytes of an answer")
_LOGGER = logging.getLogger(__name__)


class HubName(NamedTuple):
    """A data set and one of its revisions."""

    name: str
    """`owner/name`."""
    revision: str | None
    """A branch, a tag or a commit; None: the main branch."""

    def __str__(self) -> str:
        return f"{HUB}://datasets/{self.name}" + (f"@{self.revision}" if self.revision else "")


def check_hub_name(address: str, name: str = "address") -> tuple[HubName, str]:
    """The data set of an address, and what of it is named ("": all).

    Raises:
      ValueError: the address has another form.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ValueError(f"{name}={address!r} is no data set of the hub; write {_FORM}.")
    return HubName(found[1], found[2]), (found[3] or "").strip("/")


def list_files(address: str) -> tuple[HubName, list[Any]]:
    """The data set at the commit that its revision is now, and all its files as the client says.

    Raises:
      ImportError: the package huggingface_hub is not installed.
      ValueError: there is no such data set or revision, or the hub names no commit.
      OSError: the hub cannot be reached, or refuses.
    """
    wanted, _ = check_hub_name(address)
    client = hub_client("Data sets of the hub are fetched")
    api = client.HfApi(library_name="fwpkm_jax")
    with asking(client, wanted.name, wanted.revision, what="data set"):
        sha = api.dataset_info(wanted.name, revision=wanted.revision).sha
        commit = checked_commit(wanted.name, sha, wanted.revision)
        entries = files_at(client, api, wanted.name, commit, "dataset")
    repository = HubName(wanted.name, commit)
    if not is_commit(wanted.revision or ""):
        _LOGGER.warning(
            "%s is now commit %s; name %s to read the same files later.",
            wanted,
            commit,
            repository,
        )
    return repository, entries


def is_commit(revision: str) -> bool:
    """Whether a revision has the form of a commit, 40 hexadecimal digits."""
    return _COMMIT.fullmatch(revision) is not None


def is_inside(path: str) -> bool:
    """Whether a relative path, with slashes, stays in its folder."""
    return "\\" not in path and not {"", ".", ".."} & {*path.split("/")}


def checked_commit(name: str, sha: object, wanted: str | None) -> str:
    """The commit that a hub names; refuses another form, because it becomes part of a path.

    Args:
      sha: what the hub names.
      wanted: the revision that was asked for; if it is a commit, the hub must name the same.
    """
    if not is_commit(str(sha)):
        problem = f"has the commit {shown(repr(sha), 60)} at this hub, not 40 hexadecimal digits"
        raise OutsideFileError(name, problem, otherwise=OTHER_HUB)
    if wanted is not None and is_commit(wanted) and sha != wanted:
        problem = f"has the commit {sha} at this hub where {wanted} was asked for"
        raise OutsideFileError(name, problem, otherwise=OTHER_HUB)
    return str(sha)


def files_at(client: Any, api: Any, name: str, commit: str, kind: str) -> list[Any]:
    """All files of a repository at a commit; refuses a path that leads outside, as it is joined.

    Args:
      client: from `hub_client`.
      api: the client's `HfApi`.
      commit: of it.
      kind: "model" or "dataset".
    """
    tree = api.list_repo_tree(name, repo_type=kind, revision=commit, recursive=True)
    files: list[Any] = []
    for file in (x for x in tree if isinstance(x, client.hf_api.RepoFile)):
        if len(files) == _MOST_FILES:
            problem = f"has more than {_MOST_FILES:,} files at this hub"
            raise OutsideFileError(name, problem, otherwise=OTHER_HUB)
        if not is_inside(file.path):
            problem = f"has the file {shown(file.path, 60)!r} at this hub, outside its folder"
            raise OutsideFileError(name, problem, otherwise=OTHER_HUB)
        files.append(file)
    return files


def download(client: Any, name: str, path: str, commit: str, kind: str, *, size: int) -> Path:
    """A file in the client's cache; one that is there is not fetched again. See `files_at`.

    Args:
      size: bytes, as the list of files states; a hub that sends many more is refused.
    """
    before = _most.set(max(size, _MOST_BYTES))
    try:
        found = client.hf_hub_download(
            name, path, repo_type=kind, revision=commit, library_name="fwpkm_jax"
        )
    finally:
        _most.reset(before)
    return Path(found)


def fetch_file(repository: HubName, path: str, *, size: int) -> Path:
    """A file of a data set in the client's cache; one that is there is not fetched again.

    Raises:
      OSError: the hub cannot be reached, or refuses.
    """
    client = hub_client("Data sets of the hub are fetched")
    name, commit = repository
    assert commit is not None
    with asking(client, name, commit, what="data set"):
        return download(client, name, path, commit, "dataset", size=size)


def hub_client(done: str) -> Any:
    """The client, which only some installations have.

    Raises:
      ImportError: it is not installed.
    """
    for module in ("constants", "errors", "hf_api"):  # Become attributes of the package.
        import_extra(f"huggingface_hub.{module}", done, extra="hf")
    client, http = (
        import_extra(f"huggingface_hub{x}", done, extra="hf") for x in ("", ".utils._http")
    )
    make = http._GLOBAL_CLIENT_FACTORY  # The user's own where there is one.
    if getattr(make, "func", None) is not _checked_session:
        client.set_client_factory(functools.partial(_checked_session, make))
    return client


def _checked_session(make: Callable[[], Any]) -> Any:
    """A session of the client that refuses answers of which it would make paths."""
    session = make()
    hooks = session.event_hooks
    session.event_hooks = {**hooks, "response": [*hooks.get("response", ()), _check_answer]}
    return session


def _check_answer(response: Any) -> None:
    """Refuses headers that lead outside the cache, which the client joins to a path unchecked.

    It would also read whatever comes: an answer that has no end is refused while it is read.
    """
    whole, most = response.iter_bytes, _most.get(_MOST_BYTES)
    url = without_login(str(response.request.url))

    def iter_bytes(chunk_size: int | None = None) -> Iterator[bytes]:
        come = 0
        for some in whole(chunk_size):
            come += len(some)
            if come > most:
                problem = f"has more than {most:,} bytes at this hub"
                raise OutsideFileError(url, problem, otherwise=OTHER_HUB)
            yield some

    response.iter_bytes = iter_bytes
    if response.request.method != "HEAD":
        return
    for header in ("ETag", "X-Linked-ETag", "X-Repo-Commit"):
        value = response.headers.get(header)
        name = (value or "").lstrip("W/").strip('"')  # As the client takes it.
        if value is not None and not (is_inside(name) and "/" not in name):
            problem = f"has {header} {shown(name, 60)!r} at this hub, which is no name of a file"
            raise OutsideFileError(url, problem, otherwise=OTHER_HUB)


@contextlib.contextmanager
def asking(client: Any, name: str, revision: str | None, *, what: str = "model") -> Iterator[None]:
    """Turns what the client raises into one line that says what to do."""
    errors, hub = client.errors, without_login(client.constants.ENDPOINT)
    try:
        yield
    except errors.GatedRepoError as error:
        raise OSError(f"{name} is gated: accept its terms at {hub}/{name}, and {LOGIN}.") from error
    except errors.RepositoryNotFoundError as error:
        here = "no folder here and " if what == "model" else ""
        raise ValueError(
            f"{name} is {here}no {what} of {hub} that you may read; check the name, or "
            f"{LOGIN} if it is private."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{name} has no revision {shown(revision)!r} at {hub}.") from error
    except errors.LocalTokenNotFoundError as error:
        raise OSError(f"Nobody is logged in at {hub}; {LOGIN}.") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        way_out = LOGIN if status in (401, 403) else AGAIN
        raise OSError(f"{hub} answered {status} for {name}; {way_out}.") from error
    except (ImportError, OutsideFileError):
        raise
    except Exception as error:  # Of the network; the client's packages have kinds of their own.
        reason = re.sub(r"Bearer [^'\"]*", "Bearer ...", without_login(str(error)))
        raise OSError(
            f"{hub} cannot be asked for {name} ({type(error).__name__}: {shown(reason, 100)}); "
            f"{AGAIN}."
        ) from error
