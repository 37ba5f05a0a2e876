"""Admission, staleness, order of steps and resume points: pure functions of integers."""
