"""The rollout worker: `prompts` and `weights` -> `rollouts`. Generation loop, groups in flight, single calls."""
