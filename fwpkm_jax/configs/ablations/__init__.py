"""Models of Appendix D of the FwPKM paper: its headline hybrid with one choice changed."""
