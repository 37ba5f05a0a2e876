"""Attacks by reward functions and agents in child processes: what outlives them, and what they reach."""
