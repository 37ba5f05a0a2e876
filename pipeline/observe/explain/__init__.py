"""The life of one prompt, from a run's topics alone."""
