"""The runs that come with the package: `NAME.py` defines `get_config() -> Experiment`.

`fwpkm train NAME` trains one; another file imports it and changes it with `dataclasses.replace`.
"""
