"""Histograms and maps of the gates."""
