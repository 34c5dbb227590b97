"""Options of a memory of slots, each at its own place beside the plain write."""
