"""The keys of a memory of slots: how queries find slots, and how the keys move."""
