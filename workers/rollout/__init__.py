"""The rollout worker: `prompts` and `weights` -> `rollouts`."""
