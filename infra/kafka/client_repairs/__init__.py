"""Faults of the client library, repaired in place, and the private parts of it that are used; nothing here is for speed alone."""
