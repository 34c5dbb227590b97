"""`fwpkm train [CONFIG] [--section.field VALUE ...]` and `fwpkm train --resume RUN`.

Exit codes: 0 finished; 1 training failed; 2 wrong command line, configuration or run directory;
130 and 143 after SIGINT and SIGTERM. Every finished step is then saved, and the same command
continues the run. A signal during compilation ends the program at once.
If one of several processes (`--distributed...`) ends, the others end too.
"""

import logging
import os
import sys
from collections.abc import Sequence
from functools import partial

import jax

from fwpkm_jax.cli.experiment import parse_command_line
from fwpkm_jax.io.terminal import is_deliberate, report, say_error, start_logging
from fwpkm_jax.io.untrusted import shown
from fwpkm_jax.run.train import train
from fwpkm_jax.storage.compile_cache import use_compile_cache
from fwpkm_jax.storage.lock import LostLockError
from fwpkm_jax.training.checkpoints.restore import DamagedCheckpointError
from fwpkm_jax.training.compiling import abandoned_compilation
from fwpkm_jax.training.diagnosis import NonFiniteError
from fwpkm_jax.training.runs.processes import (
    LOST,
    DistributedConfig,
    OtherProcessError,
    connect,
)

DEFAULT_CONFIG = "recall"


def main(arguments: Sequence[str], program: str = "fwpkm train") -> int:
    """Trains the experiment of a command line; returns the program's exit code."""
    start_logging("%(levelname)s: %(message)s")
    try:
        experiment = parse_command_line(arguments, default=DEFAULT_CONFIG, prog=program)
    except (ValueError, FileNotFoundError) as error:
        return report(program, error)
    alone = experiment.distributed == DistributedConfig()
    try:
        use_compile_cache()
        connect(experiment.distributed, say=partial(print, flush=True), program=program)
        result = train(experiment)
    except LostLockError as error:
        return _failed(program, error, alone=alone)
    except (ValueError, FileNotFoundError) as error:
        if not alone and not is_deliberate(error):
            return _failed(program, f"{shown(error)}. {LOST}", alone=alone)
        return report(program, error)
    except OSError as error:
        # Silences messages of abandoned writes, which would follow the error message.
        logging.disable()
        sys.unraisablehook = lambda _: None
        said = (
            f"{str(error).rstrip('.')}. Fix the cause; the same command then continues from the "
            f"newest checkpoint in {experiment.run_dir}."
        )
        return _failed(program, said, alone=alone)
    except (NonFiniteError, DamagedCheckpointError, OtherProcessError) as error:
        say_error(program, error)
        return 1
    except jax.errors.JaxRuntimeError as error:
        if alone:
            raise
        return _failed(program, f"{shown(error)}. {LOST}", alone=alone)
    code = 0 if result.signal is None else 128 + result.signal
    if abandoned_compilation():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # The compiler's threads would crash while the interpreter ends.
    return code


def _failed(program: str, said: object, *, alone: bool) -> int:
    """Says why; the exit code after an error that this process alone has met. Where there are
    others, the process ends here: JAX would wait for them, and then abort."""
    say_error(program, said)
    if not alone:
        os._exit(1)
    return 1
