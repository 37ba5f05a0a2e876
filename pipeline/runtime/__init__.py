"""Shared by all workers: entry point, session, roles, leases, telemetry (status, Prometheus), run registry, topics, weights."""
