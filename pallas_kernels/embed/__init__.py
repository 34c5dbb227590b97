"""Rows of an embedding, with a gradient that has the same bits in every run."""

from pallas_kernels.embed.api import embed as embed
