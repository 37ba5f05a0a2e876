"""Rollout workers that join, leave and restart: throughput, delays, memory and CPU."""
