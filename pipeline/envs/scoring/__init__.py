"""Calls of reward functions: processes, return values, logged values and failures."""
