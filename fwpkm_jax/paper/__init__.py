"""What reproduces the FwPKM paper (arXiv:2601.00671) and serves no other end.

The rest of the package knows it by names alone, and imports it when one of them is asked for.
"""
