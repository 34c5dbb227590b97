"""Compiles while Python keeps answering signals."""

import threading
from typing import Any

import jax

_running: set[threading.Thread] = set()


def compile_answering(function: jax.stages.Wrapped, *arguments: Any) -> jax.stages.Compiled:
    """Compiles `function` for these arguments; signal handlers still run without delay.

    Python runs signal handlers in the main thread between two instructions, and a compilation is
    one long instruction. So a second thread compiles, and the main thread waits for it. If a
    handler raises, the exception leaves this function at once and the compilation is abandoned.

    Tracing stays in the calling thread, where a handler may raise as well.

    Returns:
      The compiled function; it accepts arguments of the same shapes, dtypes and layouts only.
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

    # A daemon thread, so that Python does not wait for it when the program ends.
    thread = threading.Thread(target=run, name="compile", daemon=True)
    _running.add(thread)
    thread.start()
    while thread.is_alive():
        # With a timeout: on some systems a wait without one blocks signal handlers.
        thread.join(timeout=1.0)
    if errors:
        raise errors[0]
    return results[0]


def abandoned_compilation() -> bool:
    """Whether an abandoned compilation is still running.

    A program that ends then must use `os._exit`: the compiler's threads crash if the interpreter
    shuts down while they run.
    """
    return bool(_running)
