"""Samples, groups, steps, turns and timeline of a run as Arrow tables."""
