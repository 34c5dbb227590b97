"""The small study of docs/measurements/study.md: models of bytes that a CPU trains in minutes."""
