"""What a worker stands on: entry point, session, roles, reporter, run registry, topic reader, weight sync, dead letters, commit notes."""
