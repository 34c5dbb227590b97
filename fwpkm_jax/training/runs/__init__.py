"""What surrounds a training run: directory, lock, metrics, progress, signals, processes."""
