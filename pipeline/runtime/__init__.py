"""What every worker stands on: entry point, session, reporter, dead letters, commit notes, roles, weight sync, registry, topic reader."""
