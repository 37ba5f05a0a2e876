"""The workers: one folder per role. Workers never import each other; what they agree on is in `pipeline`."""
