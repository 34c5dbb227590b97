"""Runs `benchmarks.bring_up.suite`."""

import sys

from benchmarks.bring_up.suite import main

sys.exit(main())
