"""Prompts and rewards: data sets, tokenization, reward functions, environments, and the outcome of a group."""
