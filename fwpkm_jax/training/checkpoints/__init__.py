"""Saves, checks and restores checkpoints."""
