"""Former path of `pipeline/data/tokenization.py`, for scripts outside this repository that import it."""
