"""BABILong: the facts of a bAbI question between the sentences of a long text.

References: Kuratov et al. 2024, arXiv:2406.10149; Weston et al. 2015, arXiv:1502.05698.
"""
