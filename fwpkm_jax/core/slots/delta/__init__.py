"""Sparse Delta Memory: a table of slots written by the gated delta rule, token by token."""
