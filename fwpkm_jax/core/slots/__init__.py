"""A table of slots: addressing, reads, writes, and how whole sequences are run through it."""
