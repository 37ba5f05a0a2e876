"""The in-memory log for tests and simulations."""
