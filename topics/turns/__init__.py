"""Turns of trajectories that travel through the log: what is asked of the policy, and what it drew."""
