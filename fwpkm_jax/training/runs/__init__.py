"""A run on disk and on screen: directory, lock, records, progress, signals, processes."""
