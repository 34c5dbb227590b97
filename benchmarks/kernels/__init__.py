"""Time, exactness and determinism of single operations on the device."""
