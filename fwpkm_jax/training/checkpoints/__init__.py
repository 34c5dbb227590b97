"""Checkpoints: saved, checked, restored."""
