"""Faults of the pinned Kafka client, repaired in place."""
