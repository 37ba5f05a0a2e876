"""Commands that look at a run: none writes to a topic."""
