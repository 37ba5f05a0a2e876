"""Turns of trajectories that travel through the log: generation requests and their replies."""
