"""`python -m fwpkm_jax` is the command `fwpkm`."""

import os
import signal
import sys


def _stop(number, frame):
    os.write(2, b"fwpkm: interrupted.\n")
    os._exit(130)


def _leave_out_current_folder():
    """Takes the current folder from where modules are found, into which `-m` puts it first.

    A run folder may be a stranger's: a file `json.py` in it must not run. A checkout that is not
    installed is found there, and stays.
    """
    checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if sys.path and not sys.flags.safe_path:
        first = os.path.realpath(sys.path[0] or os.curdir)
        if first == os.path.realpath(os.curdir) != os.path.realpath(checkout):
            del sys.path[0]


if __name__ == "__main__":
    _leave_out_current_folder()
    signal.signal(signal.SIGINT, _stop)  # Until a command has its own: imports take seconds.
    from fwpkm_jax.cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
