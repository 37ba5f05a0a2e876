"""What every worker stands on: entry point, session, roles, weight sync, the run registry and the reader of a run's topics."""
