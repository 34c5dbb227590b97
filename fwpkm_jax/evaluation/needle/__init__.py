"""Needle in a haystack: reads a text n times, then answers a question from memory.

References: Zhao and Jones 2026, arXiv:2601.00671, section 4.3; Figures 4 and 10.
"""
