"""The small study of docs/study.md: models of bytes that a CPU trains in minutes."""
