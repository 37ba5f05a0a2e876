"""Reward functions: built-in ones and users' own, run in child processes under time limits; outcomes of groups."""
