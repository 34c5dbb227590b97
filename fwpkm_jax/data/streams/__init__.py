"""Text that is read while training: files of several kinds, on this machine, a hub or a bucket."""
