"""A run's checkpoints: written in the background, verified, and thinned out."""
