"""The runs that come with the package; `fwpkm train NAME` trains one.

A file is one run, `get_config() -> Experiment`, named as the file; or a table of runs, `CONFIGS`:
`paper.py`, `real_size.py` and `study.py`. Another file imports a run and changes it with
`dataclasses.replace`.
"""
