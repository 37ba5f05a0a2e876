"""The environment worker: `prompts` and `replies` -> `calls` and `rollouts`."""
