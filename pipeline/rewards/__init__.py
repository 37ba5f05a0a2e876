"""Reward functions: how they are found, called in child processes, limited in time, and combined into the outcome of a group."""
