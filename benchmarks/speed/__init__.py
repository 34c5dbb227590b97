"""Time and peak memory of the library's layers, streams and training steps."""
