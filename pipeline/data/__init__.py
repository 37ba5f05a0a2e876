"""Data sets with random access to rows, the prompts of a run, chat templates and tokenization."""
