"""Evaluations of policy versions on held-out prompts, whichever worker has the engine."""
