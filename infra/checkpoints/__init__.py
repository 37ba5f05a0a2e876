"""A run's checkpoints: what is kept, how one is written while training goes on, and how one is verified."""
