"""Verifies the statement in a model's directory: its files, its run's log, and some steps repeated."""
