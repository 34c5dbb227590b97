"""Perplexity of answers about long texts."""
