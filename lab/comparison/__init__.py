"""Small decoders, one per kind of memory, on generated tasks."""
