"""Writes a source to a tokenised file in bounded memory; a stopped job can be continued.

The manifest `NAME.json` is written after `NAME.bin` and `NAME.idx`: if it exists, the files are
complete. Before that, `NAME.partial.json` says how much of the partial files is valid.
"""

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fwpkm_jax.data.json_lines import Place
from fwpkm_jax.data.prepare.output import (
    START,
    Layout,
    TokenOutput,
    discard,
    final_files,
    partial_files,
    publish,
)
from fwpkm_jax.data.prepare.sources import Source
from fwpkm_jax.data.streams.files import AbstractDataFile, LocalFile
from fwpkm_jax.data.streams.formats import Tokens, encoded
from fwpkm_jax.data.token_files import check_token_file
from fwpkm_jax.data.tokenizers import Tokenizer, load_tokenizer
from fwpkm_jax.io.atomic import remove_unfinished, write_json
from fwpkm_jax.io.status_line import StatusLine
from fwpkm_jax.io.untrusted import read_json
from fwpkm_jax.storage.lock import Lock

# Pieces between two looks at the clock.
_BETWEEN = 16
# Between lines, on a terminal and elsewhere.
_SHOW_SECONDS = {True: 0.5, False: 30.0}


Manifest = dict[str, Any]
"""Content and origin of a tokenised file, JSON values by name.

job: source, tokenizer, layout and limits, all that determines the files. read: `documents`,
`characters` and `tokens`, ends of documents and what was cut off included. written: `entries` and
`tokens` of the files. inputs, outputs: `bytes` and `sha256` of each file, by its name.
"""
State = dict[str, Any]
"""A point from which a job can continue: `job`, `read` and `inputs` as in the manifest; `span`, and
`place`, of the last piece of it that was read; `written`, from `TokenOutput.sync`; `finished`:
everything is in the partial files."""


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
        state = _read_if_there(state_path)
        if state is None:
            _check_absent(out)
            read = {"documents": 0, "characters": 0, "tokens": 0}
            state = {"job": job, "span": 0, "place": None, "read": read}
            state |= {"written": START, "inputs": {}, "finished": False}
            save(state)  # From here on the partial files are this job's.
        _check_same_job(state["job"], job, what=str(state_path))
        if not state["finished"]:
            try:
                _write(out, state, source, encoder, num_threads, save, save_seconds, status)
            except Exception:
                if _read_if_there(state_path)["place"] is None:  # Nothing to go on from.
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
        manifest = {
            "job": state["job"],
            "read": state["read"],
            "written": {name: state["written"][name] for name in ("entries", "tokens")},
            "inputs": dict(sorted(state["inputs"].items())),
            "outputs": {x.name: _checksum(LocalFile(str(x), x)) for x in final_files(out)},
        }
        write_json(manifest_path, manifest)
        state_path.unlink()
    counts = manifest["written"]
    status.say(
        f"{out}: {counts['entries']:,} entries, {counts['tokens']:,} tokens{_shortfall(manifest)}"
    )
    return manifest


def _write(
    out: Path,
    state: State,
    source: Source,
    encoder: Tokenizer,
    num_threads: int | None,
    save: Callable[[State], None],
    save_seconds: float,
    status: StatusLine,
) -> None:
    """Reads, encodes and writes pieces from a state on, to the end or to a limit; saves it."""
    job, read = state["job"], state["read"]
    began = saved = shown = time.monotonic()
    before = read["tokens"]
    output = TokenOutput(
        out,
        state["written"],
        layout=job["layout"],
        vocab_size=encoder.vocab_size,
        max_tokens=job["max_tokens"],
    )
    with contextlib.closing(output):
        for number, piece in enumerate(_pieces(state, source, encoder, num_threads)):
            output.add(piece.tokens, ends=piece.ends)
            read["documents"] += piece.ends or output.full
            read["characters"] += piece.characters
            read["tokens"] += len(piece.tokens)
            state["place"] = list(piece.place)
            limit = job["max_characters"]
            reached = limit is not None and read["characters"] >= limit
            if output.full or (piece.ends and reached):
                break
            if number % _BETWEEN:
                continue
            now = time.monotonic()
            if now - shown >= _SHOW_SECONDS[status.on_terminal]:
                shown = now
                speed = (read["tokens"] - before) / max(now - began, 1e-9)
                status.show(f"{_progress(state, source)}  {speed:,.0f} tokens/s")
            if now - saved >= save_seconds:
                state["written"] = output.sync()
                save(state)
                saved = time.monotonic()
        state.update(written=output.sync(), finished=True)
        save(state)


def _progress(state: State, source: Source) -> str:
    number, read, limit = state["span"], state["read"], state["job"]["max_tokens"]
    total = "" if limit is None else f" of {limit:,}"
    return (
        f"{source.name} {number + 1}/{len(source.spans)} {source.spans[number].part.name}  "
        f"{read['documents']:,} documents  {read['tokens']:,}{total} tokens"
    )


def _pieces(
    state: State, source: Source, encoder: Tokenizer, num_threads: int | None
) -> Iterator[Tokens]:
    """The pieces behind the state's place; keeps span and checksums in the state.

    Raises:
      ValueError: a file has changed since its checksum was recorded.
    """
    for number in range(state["span"], len(source.spans)):
        part, start, stop = source.spans[number]
        read = state["place"] if number == state["span"] else None
        state["span"], state["place"] = number, read
        for name, file in part.files.items():
            now = _checksum(file)  # Whatever its size and time.
            known = state["inputs"].setdefault(name, now)
            if known != now:
                raise ValueError(
                    f"{file.name} has changed since the preparation began (SHA-256 "
                    f"{now['sha256']}, was {known['sha256']}); put it back, or delete the .partial "
                    "files and start again."
                )
        pieces = part.read(encoder, Place(start) if read is None else Place(*read))
        if stop is not None:
            pieces = itertools.takewhile(lambda x, stop=stop: x.place.record < stop, pieces)
        tokens = encoded(pieces, encoder, num_threads=num_threads)
        if read is not None:
            next(tokens, None)  # It is written.
        yield from tokens


def _checksum(file: AbstractDataFile) -> dict[str, Any]:
    return {"bytes": file.size, "sha256": file.sha256()}


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
        written = manifest["outputs"][file.name]
        if not file.exists() or _checksum(LocalFile(str(file), file)) != written:
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
