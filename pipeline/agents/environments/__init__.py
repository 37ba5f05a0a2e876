"""Multi-turn environments: their interfaces, sources by name, and child processes."""
