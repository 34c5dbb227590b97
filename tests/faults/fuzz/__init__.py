"""Readers of files from outside, given files that lie.

    python -m tests.faults.fuzz --files 10000

makes as many files for every reader, by damaging good ones and by construction, and reads them in
processes with a limit of memory and time. `readers.py` has the readers and their good files,
`damage.py` what is done to these, `__main__.py` the processes and the table.
"""
