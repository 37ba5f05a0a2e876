"""The command line `penstock`. Each command imports what it needs inside itself, so that `penstock --help` is fast."""

from penstock.pipeline.cli.app import console, main

__all__ = ["console", "main"]
