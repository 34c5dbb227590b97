"""Runs `benchmarks.first_light.suite`."""

import sys

from benchmarks.first_light.suite import main

sys.exit(main())
