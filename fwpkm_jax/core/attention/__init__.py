"""Softmax attention over whole sequences and over caches."""
