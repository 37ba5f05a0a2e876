"""A run's samples, groups, steps and intervals as Arrow tables."""
