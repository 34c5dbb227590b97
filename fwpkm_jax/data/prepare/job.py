"""Writes a source to a tokenised file in bounded memory; a stopped job can be continued.

The manifest `NAME.json` is written after `NAME.bin` and `NAME.idx`: if it exists, the files are
complete. Before that, `NAME.partial.json` says how much of the partial files is valid.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypedDict

from fwpkm_jax.data.documents import Place
from fwpkm_jax.data.prepare.output import (
    START,
    Layout,
    TokenOutput,
    Written,
    discard,
    final_files,
    partial_files,
    publish,
)
from fwpkm_jax.data.prepare.sources import Source
from fwpkm_jax.data.streams.files import AbstractDataFile, LocalFile
from fwpkm_jax.data.streams.formats import Tokens, encoded, whole_documents
from fwpkm_jax.data.token_files import check_token_file
from fwpkm_jax.data.tokenizers import Tokenizer, load_tokenizer
from fwpkm_jax.io.atomic import remove_unfinished, write_json
from fwpkm_jax.io.status_line import StatusLine
from fwpkm_jax.io.untrusted import read_json
from fwpkm_jax.storage.lock import Lock

# Documents between two looks at the clock.
_BETWEEN = 16
# Between lines, on a terminal and elsewhere.
_SHOW_SECONDS = {True: 0.5, False: 30.0}


class Checksum(TypedDict):
    """Size and checksum of a file."""

    bytes: int
    sha256: str


class Counts(TypedDict):
    """Amounts read so far."""

    documents: int
    characters: int
    tokens: int
    """Including ends of documents; exceeds the written tokens if rows were cut or capped."""


class State(TypedDict):
    """A point from which a job can continue."""

    job: dict[str, Any]
    span: int
    place: list[int] | None
    """Of the last document of the span that was read."""
    read: Counts
    written: Written
    inputs: dict[str, Checksum]
    finished: bool
    """Everything is in the partial files."""


class Manifest(TypedDict):
    """Content and origin of a tokenised file."""

    job: dict[str, Any]
    """Source, tokenizer, layout and limits: all that determines the files."""
    read: Counts
    written: dict[str, int]
    """`entries` and `tokens` of the files."""
    inputs: dict[str, Checksum]
    """Of the files that were read."""
    outputs: dict[str, Checksum]


def prepare(
    source: Source,
    *,
    out: Path,
    tokenizer: str,
    layout: Layout,
    max_tokens: int | None = None,
    max_characters: int | None = None,
    num_threads: int | None = None,
    status: StatusLine | None = None,
    save_seconds: float = 30.0,
) -> Manifest:
    """Writes a tokenised file and its manifest, or continues an interrupted job.

    A job that was killed at any time and is called again with the same arguments gives the same
    bytes as an uninterrupted one. A call after it is complete checks the written files against the
    manifest, and those of the files read that still exist.

    Args:
      source: the documents.
      out: the `.bin` file; index and manifest get its name, with `.idx` and `.json`.
      tokenizer: as for `load_tokenizer`.
      layout: "l4096" or "stream".
      max_tokens: stop after the entry that reaches this many tokens.
      max_characters: stop after the document that reaches this many characters.
      num_threads: threads of the tokenizer, which do not change the files; None: one for each
        processor.
      status: shows how far the work is; None: on standard output.
      save_seconds: least time between two points from which the job can continue.

    Raises:
      ValueError: an argument is out of range, the files belong to another command or have
        changed, or the source gives less than one entry.
    """
    for name, limit in (("max_tokens", max_tokens), ("max_characters", max_characters)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name}={limit} must be 1 or more; leave it out for no limit.")
    encoder = load_tokenizer(tokenizer)
    check_token_file(out, vocab_size=encoder.vocab_size)
    job = {
        **source.describe(),
        "tokenizer": Path(tokenizer).name,
        "tokenizer_fingerprint": encoder.fingerprint,
        "vocab_size": encoder.vocab_size,
        "eos_id": encoder.eos_id,
        "layout": layout,
        "max_tokens": max_tokens,
        "max_characters": max_characters,
    }
    job = json.loads(json.dumps(job))  # As it will be read from JSON, for comparison.
    status = status or StatusLine()
    manifest_path, state_path = out.with_suffix(".json"), out.with_suffix(".partial.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    name = f"{out.name}.lock"
    lock = Lock(out.parent, name=name, thing=str(out), otherwise="give another output")
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release)
        for path in (state_path, manifest_path):
            remove_unfinished(path)

        def save(state: State) -> None:
            lock.check()
            write_json(state_path, state)

        if (manifest := _read_if_there(manifest_path)) is not None:
            _check_complete(out, manifest, job, source)
            state_path.unlink(missing_ok=True)  # Of a job that was killed at its last line.
            status.say(f"{out} is complete; its checksums are those of {manifest_path.name}")
            return manifest
        state: State | None = _read_if_there(state_path)
        if state is None:
            _check_absent(out)
            state = _first_state(job)
            save(state)  # From here on the partial files are this job's.
        _check_same_job(state["job"], job, what=str(state_path))
        if not state["finished"]:
            try:
                write = _Writing(state, source, encoder, num_threads, save, status)
                state = write(out, save_seconds)
            except Exception:
                if _read_if_there(state_path) == _first_state(job):  # Nothing to go on from.
                    discard(out)
                    state_path.unlink()
                raise
        if not state["written"]["entries"]:
            discard(out)
            state_path.unlink()
            raise ValueError(
                f"{source.name} gave {state['read']['documents']} documents with "
                f"{state['read']['tokens']} tokens, less than one entry of layout {layout}; give "
                "more text, or take the layout stream."
            )
        lock.check()
        publish(out)
        manifest = _manifest(out, state)
        write_json(manifest_path, manifest)
        state_path.unlink()
    counts = manifest["written"]
    status.say(
        f"{out}: {counts['entries']:,} entries, {counts['tokens']:,} tokens{_shortfall(manifest)}"
    )
    return manifest


def _first_state(job: dict[str, Any]) -> State:
    """The beginning of a job."""
    return {
        "job": job,
        "span": 0,
        "place": None,
        "read": {"documents": 0, "characters": 0, "tokens": 0},
        "written": START,
        "inputs": {},
        "finished": False,
    }


class _Writing:
    """Reads, encodes and writes documents from a state on, to the end or to a limit."""

    def __init__(
        self,
        state: State,
        source: Source,
        encoder: Tokenizer,
        num_threads: int | None,
        save: Callable[[State], None],
        status: StatusLine,
    ):
        self._state, self._source, self._encoder = state, source, encoder
        self._num_threads, self._save, self._status = num_threads, save, status
        self._started = self._shown = time.monotonic()
        self._first_tokens = state["read"]["tokens"]

    def __call__(self, out: Path, save_seconds: float) -> State:
        """Returns the last state, which is saved."""
        state, job, read = self._state, self._state["job"], self._state["read"]
        output = TokenOutput(
            out,
            state["written"],
            layout=job["layout"],
            vocab_size=self._encoder.vocab_size,
            max_tokens=job["max_tokens"],
        )

        def save(*, finished: bool = False) -> State:
            """Writes everything to disk, then the state."""
            state.update(written=output.sync(), finished=finished)
            self._save(state)
            return state

        try:
            saved = time.monotonic()
            for number, document in enumerate(self._documents()):
                read["documents"] += 1
                read["characters"] += document.characters
                read["tokens"] += len(document.tokens)
                output.add(document.tokens)
                state["place"] = list(document.place)
                limit = job["max_characters"]
                if output.full or (limit is not None and read["characters"] >= limit):
                    break
                if number % _BETWEEN == 0:
                    self._show()
                    if time.monotonic() - saved >= save_seconds:
                        save()
                        saved = time.monotonic()
            return save(finished=True)
        finally:
            output.close()

    def _documents(self) -> Iterator[Tokens]:
        """The documents behind the state's place; keeps span and checksums in the state."""
        state = self._state
        for number in range(state["span"], len(self._source.spans)):
            part, start, stop = self._source.spans[number]
            read = state["place"] if number == state["span"] else None
            state["span"], state["place"] = number, read
            for name, file in part.files.items():
                _add_checksum(state["inputs"], name, file)
            pieces = part.read(self._encoder, Place(start) if read is None else Place(*read))
            if stop is not None:
                pieces = itertools.takewhile(lambda x, stop=stop: x.place.record < stop, pieces)
            documents = whole_documents(
                encoded(pieces, self._encoder, num_threads=self._num_threads)
            )
            if read is not None:
                next(documents, None)  # It is written.
            yield from documents

    def _show(self) -> None:
        """Prints how far the work is, now and then."""
        now = time.monotonic()
        if now - self._shown < _SHOW_SECONDS[self._status.on_terminal]:
            return
        self._shown = now
        state, spans, limit = self._state, self._source.spans, self._state["job"]["max_tokens"]
        tokens, number = state["read"]["tokens"], state["span"]
        speed = (tokens - self._first_tokens) / max(now - self._started, 1e-9)
        total = "" if limit is None else f" of {limit:,}"
        self._status.show(
            f"{self._source.name} {number + 1}/{len(spans)} {spans[number].part.name}  "
            f"{state['read']['documents']:,} documents  {tokens:,}{total} tokens  "
            f"{speed:,.0f} tokens/s"
        )


def _add_checksum(known: dict[str, Checksum], name: str, file: AbstractDataFile) -> None:
    """Hashes a file, whatever its size and time, before it is read.

    Raises:
      ValueError: it has changed since another process recorded it.
    """
    now = _checksum(file)
    if name in known and known[name] != now:
        raise ValueError(
            f"{file.name} has changed since the preparation began (SHA-256 {now['sha256']}, was "
            f"{known[name]['sha256']}); put it back, or delete the .partial files and start again."
        )
    known[name] = now


def _checksum(file: AbstractDataFile) -> Checksum:
    return {"bytes": file.size, "sha256": file.sha256()}


def _local_checksum(path: Path) -> Checksum:
    return _checksum(LocalFile(str(path), path))


def _shortfall(manifest: Manifest) -> str:
    """The message about a source that ended before any of its limits."""
    held = {
        "max_tokens": manifest["written"]["tokens"],
        "max_characters": manifest["read"]["characters"],
    }
    limits = {name: manifest["job"][name] for name in held if manifest["job"][name] is not None}
    if not limits or any(held[name] >= limit for name, limit in limits.items()):
        return ""
    return "; the source ended before " + " and ".join(
        f"{name}={limit:,}" for name, limit in limits.items()
    )


def _manifest(out: Path, state: State) -> Manifest:
    return {
        "job": state["job"],
        "read": state["read"],
        "written": {name: state["written"][name] for name in ("entries", "tokens")},
        "inputs": dict(sorted(state["inputs"].items())),
        "outputs": {file.name: _local_checksum(file) for file in final_files(out)},
    }


def _check_absent(out: Path) -> None:
    for file in (*final_files(out), *partial_files(out)):
        if os.path.lexists(file):
            raise ValueError(
                f"{file} exists without a manifest that says what it is; move it away or give "
                "another output."
            )


def _check_complete(out: Path, manifest: Manifest, job: dict[str, Any], source: Source) -> None:
    _check_same_job(manifest["job"], job, what=f"{out}, with its .idx and .json,")
    for file in final_files(out):
        if not file.exists() or _local_checksum(file) != manifest["outputs"][file.name]:
            raise ValueError(
                f"{file} is not the file its manifest {out.stem}.json describes; delete all three "
                "and run the command again."
            )
    inputs = {name: file for span in source.spans for name, file in span.part.files.items()}
    for name, read in manifest["inputs"].items():
        file = inputs.get(name)
        if isinstance(file, LocalFile) and file.path.is_file() and _checksum(file) != read:
            raise ValueError(
                f"{file.name} has changed since {out} was made of it; put it back, or delete "
                f"{out.stem}.bin, .idx and .json and run the command again."
            )


def _read_if_there(path: Path) -> Any:
    return read_json(path, otherwise="delete it to start again") if path.exists() else None


def _check_same_job(saved: dict[str, Any], job: dict[str, Any], *, what: str) -> None:
    for name in job | saved:
        if saved.get(name) != job.get(name):
            raise ValueError(
                f"{what} belongs to another command: its {name} is {_short(saved.get(name))}, "
                f"not {_short(job.get(name))}; give another output, or delete it to start again."
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."
