"""One file per operation, each with its `ENTRY`."""
