"""Prompts and how their completions are judged: data sets, tokenization, rewards and the outcome of a group."""
