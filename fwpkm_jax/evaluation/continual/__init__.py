"""Loss of every domain as each is read."""
