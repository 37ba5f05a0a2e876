"""Multi-turn trajectories between a policy and an environment or an agent, and their records."""
