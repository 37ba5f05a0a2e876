"""Reruns a stage from the log: training, scoring, generation."""
