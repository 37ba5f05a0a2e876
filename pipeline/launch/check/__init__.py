"""Checks before a run starts: its numbers, its inputs, the machine, the samples of a step."""
