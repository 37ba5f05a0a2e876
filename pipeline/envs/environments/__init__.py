"""Environments of several turns: how they are written, found by name, and run in child processes."""
