"""Commands that inspect a run. They write to no topic."""
