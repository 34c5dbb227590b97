"""The runs that come with the package; `fwpkm train NAME` trains one.

A file is one run, `get_config() -> Experiment`, named as the file. Another file imports a run and
changes it with `dataclasses.replace`. A file of several runs has a table of such functions by name,
`CONFIGS`, as `fwpkm_jax.paper.configs` has.
"""
