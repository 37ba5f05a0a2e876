"""The evaluator: held-out prompts -> `metrics`."""
