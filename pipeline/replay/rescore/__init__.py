"""Scores recorded samples with the same or other reward functions."""
