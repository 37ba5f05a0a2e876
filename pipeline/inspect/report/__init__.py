"""The report of a run: numbers, then text."""
