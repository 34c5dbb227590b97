"""Chunked memories token by token: what waits, what is read, when it is written."""
