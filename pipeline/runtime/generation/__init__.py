"""From prompts to samples: what a rollout worker and an environment worker share."""
