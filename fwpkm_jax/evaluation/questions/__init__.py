"""Benchmarks that ask questions about texts: LAMBADA, RULER, BABILong, LongBench's own scores."""
