"""Trajectories of several turns between a policy and an environment or an agent, and what becomes of them."""
