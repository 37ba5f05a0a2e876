"""Alias of `pipeline/data/tokenization.py`, for scripts that import it by its earlier name."""
