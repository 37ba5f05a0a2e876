"""What every worker stands on: entry point, session, reporter, dead letters, commit notes, roles, weight sync, run registry, topic reader."""
