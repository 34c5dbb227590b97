"""Compiles while Python goes on to answer signals."""

from __future__ import annotations

import threading
from typing import Any

import jax

_running: set[threading.Thread] = set()


def compile_answering(function: jax.stages.Wrapped, *arguments: Any) -> jax.stages.Compiled:
    """`function` compiled for these arguments, while signal handlers run at once.

    Python runs signal handlers in the main thread between two instructions, and a compilation is
    one long instruction. So it runs in a thread of its own, for which the main thread waits. If a
    handler raises, the exception leaves this function at once and the compilation is abandoned.

    Tracing stays in this thread, where a handler may raise as well.
    """
    lowered = function.lower(*arguments)
    results: list[jax.stages.Compiled] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(lowered.compile())
        except BaseException as error:
            errors.append(error)
        finally:
            _running.discard(threading.current_thread())

    # A daemon, so that an interpreter that ends does not wait for it.
    thread = threading.Thread(target=run, name="compile", daemon=True)
    _running.add(thread)
    thread.start()
    while thread.is_alive():
        # In pieces: a wait without a timeout answers no signal on some systems.
        thread.join(timeout=1.0)
    if errors:
        raise errors[0]
    return results[0]


def abandoned_compilation() -> bool:
    """Whether a compilation is still running that nobody waits for.

    A program that ends then must use `os._exit`: the compiler's threads crash when the interpreter
    is taken down below them.
    """
    return bool(_running)
