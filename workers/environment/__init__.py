"""The environment worker: `prompts` -> `calls`; `replies` -> `rollouts`."""
