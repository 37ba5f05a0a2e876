"""The evaluator: held-out prompts -> `metrics`. Its own engine, or one shared with a rollout worker."""
