"""Files of this machine and objects of buckets: addresses, copies of folders, one lock."""
