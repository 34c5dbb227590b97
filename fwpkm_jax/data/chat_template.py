"""Fills in chat templates in a process of their own, with limits of time and memory.

A chat template is a program that comes with a model. A sandbox keeps it from files and functions,
but not from endless loops or texts of gigabytes. So a second Python process fills it in: the system
ends that process when it has computed too long, and gives it no more memory than it may have. The
process is started once and waits for the next request, which then takes less than a millisecond.

This file is also that process's program; it imports nothing of this package.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import IO, Any, NoReturn

CPU_SECONDS = 5
"""That a template may compute."""
MEMORY_BYTES = 2**29
"""Of addresses that its process may have."""
MOST_TEXT = 2**24
"""Characters that a template may write."""
_WALL_SECONDS = 120  # For a machine that does a lot else.


class TemplateFailedError(Exception):
    """A template cannot be filled in; the message says why, in a clause."""


class _Renderer:
    """The process, and the pipes to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """What `render` gives."""
        request = json.dumps({"template": template, "values": values}).encode()
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                _write(process.stdin, request)
                answer = _read(process.stdout, deadline=time.monotonic() + _WALL_SECONDS)
            except (BrokenPipeError, EOFError, TimeoutError) as error:
                late = isinstance(error, TimeoutError)
                if not late:
                    process.wait()  # It has ended; its exit code says how.
                self.end()
                raise TemplateFailedError(_why(process.returncode, late=late)) from None
            except BaseException:
                self.end()  # What is left in the pipe would answer the next request.
                raise
        if "error" in answer:
            raise TemplateFailedError(answer["error"])
        return answer["text"]

    def _started(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():  # A copy by fork must not use the first one's pipes.
            self._process, self._owner = None, os.getpid()
        if self._process is not None and self._process.poll() is not None:
            self.end()
        if self._process is None:
            # Without the site module it starts faster; the paths are this process's.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # Ctrl-C is not meant for it.
            )
            assert self._process.stdin is not None
            _write(self._process.stdin, json.dumps([os.path.abspath(x) for x in sys.path]).encode())
        return self._process

    def end(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):  # What was not yet written cannot be any more.
                    if pipe is not None:
                        pipe.close()
            self._process = None


_renderer = _Renderer()
atexit.register(_renderer.end)


def render(template: str, values: Mapping[str, Any]) -> str:
    """The text that a template writes.

    Args:
      template: in Jinja's language, as the transformers library fills it in.
      values: JSON values by the names that the template uses.

    Raises:
      TemplateFailedError: it refuses the values, is wrong, or needs more time or memory than
        `CPU_SECONDS` and `MEMORY_BYTES`.
    """
    return _renderer.render(template, values)


def _why(returncode: int | None, *, late: bool) -> str:
    if late or returncode == -signal.SIGXCPU:
        return f"it computes for more than {CPU_SECONDS} seconds"
    return f"its process ended with exit code {returncode}"


def _write(pipe: IO[bytes], content: bytes) -> None:
    pipe.write(len(content).to_bytes(8, "little") + content)
    pipe.flush()


def _read(pipe: IO[bytes], *, deadline: float | None = None) -> Any:
    """The next value in a pipe.

    Raises:
      EOFError: the other process has ended.
      TimeoutError: there is none before the deadline.
    """
    size = int.from_bytes(_exactly(pipe, 8, deadline), "little")
    return json.loads(_exactly(pipe, size, deadline))


def _exactly(pipe: IO[bytes], size: int, deadline: float | None) -> bytes:
    pieces = []
    while size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise TimeoutError
        piece = os.read(pipe.fileno(), min(size, 2**20))
        if not piece:
            raise EOFError
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _serve() -> NoReturn:
    """Answers requests until the other process has ended."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    sys.path[:] = _read(source)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    memory = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_BYTES, most)
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit.
        resource.setrlimit(resource.RLIMIT_AS, (memory, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    environment = _environment()
    while True:
        try:
            request = _read(source)
        except EOFError:
            os._exit(0)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        limit = int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
        try:
            text = environment.from_string(request["template"]).render(request["values"])
            answer = {"text": text}
            if len(text) > MOST_TEXT:
                answer = {"error": f"it writes more than {MOST_TEXT:,} characters"}
            content = json.dumps(answer).encode()
            del text, answer
        except MemoryError:
            content = json.dumps({"error": f"it needs more than {memory:,} bytes"}).encode()
        except RecursionError:
            content = json.dumps({"error": "it calls itself too often"}).encode()
        except Exception as error:  # A template's own errors are of any kind.
            known = type(error).__module__.startswith("jinja2")
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            content = json.dumps({"error": reason[:1000]}).encode()
        del request
        _write(target, content)


def _environment() -> Any:
    """Jinja's sandbox: a template sees its values, these functions and nothing else."""
    exceptions = importlib.import_module("jinja2")
    sandbox = importlib.import_module("jinja2.sandbox")

    def refuse(message: str) -> NoReturn:
        raise exceptions.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


if __name__ == "__main__":
    _serve()
