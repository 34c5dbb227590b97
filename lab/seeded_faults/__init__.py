"""How many single-line faults the default tests catch: faults are seeded one at a time and tested.

    python -m lab.seeded_faults --out lab/results/seeded_faults.jsonl

Each area's file lists its faults. A fault names no file: its snippet must occur exactly once in the
source (`lab/tests/test_seeded_faults.py` checks that), so that moving code moves its faults.
"""
