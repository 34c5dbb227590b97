"""Trains a model: `python train.py [configs/NAME.py] [--section.field VALUE ...]`.

Exit codes: 0 finished; 1 training failed; 2 wrong command line, configuration or run directory;
130 and 143 after SIGINT and SIGTERM, with the current step saved: the same command continues it.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "recall.py"


def main(arguments: list[str]) -> int:
    """Trains as the command line asks; the program's exit code."""
    # Imported here so that the data's worker processes, which import this file, start fast.
    from fwpkm_jax.command_line import report
    from fwpkm_jax.config import parse_command_line
    from fwpkm_jax.training.checkpoint import DamagedCheckpointError
    from fwpkm_jax.training.diagnosis import NonFiniteError
    from fwpkm_jax.training.loop import train

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        experiment = parse_command_line(arguments, default=DEFAULT_CONFIG)
        result = train(experiment)
    except (ValueError, FileNotFoundError) as error:
        return report("train.py", error)
    except (NonFiniteError, DamagedCheckpointError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    return 0 if result.signal is None else 128 + result.signal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
