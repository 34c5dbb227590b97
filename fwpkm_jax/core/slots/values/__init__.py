"""The values of a memory of slots: rows read, grouped, exchanged and written."""
