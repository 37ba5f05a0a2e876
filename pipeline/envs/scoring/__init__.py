"""Calls of reward functions: processes, services, return values, logged values and failures."""
