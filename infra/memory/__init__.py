"""The in-memory twin of the log."""
