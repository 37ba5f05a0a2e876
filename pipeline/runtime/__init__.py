"""Shared by all workers: entry point, session, roles, leases, telemetry, run registry, topic reader, weights, dead letters, generation."""
