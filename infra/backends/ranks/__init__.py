"""A backend of several processes: rank 0 leads, the others do what it says."""
