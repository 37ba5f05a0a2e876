"""The command line `penstock`. The rule: a command imports what it needs inside itself, so that `penstock --help` answers at once."""

from penstock.pipeline.cli.app import console, main

__all__ = ["console", "main"]
