"""Evaluations of policy versions on held-out prompts, on any engine."""
