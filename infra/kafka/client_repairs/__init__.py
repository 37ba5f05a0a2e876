"""Repairs of faults in the client library, and access to its private parts; nothing here is for speed alone."""
