"""Continual learning: loss of all domains after each domain was read."""
