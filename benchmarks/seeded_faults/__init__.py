"""How many single-line faults the default tests catch: faults are seeded one at a time and tested.

    python -m benchmarks.seeded_faults --out benchmarks/results/seeded_faults.jsonl

Each area's file lists its faults. A fault names no file: its snippet must occur exactly once in the
source (`tests/benchmarks/test_seeded_faults.py` checks that), so that moving code moves its faults.
"""
