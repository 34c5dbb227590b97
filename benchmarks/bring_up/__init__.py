"""The first minutes of this library on a GPU: what to run, in which order, on a bare machine.

`python -m benchmarks.bring_up` runs the parts that `suite` lists. `cases` holds the cases that
compare kernels with their references, `correctness` runs each of them in a process of its own.
docs/howto/bring_up.md is the page for the person at the machine.
"""
