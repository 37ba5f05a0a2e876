"""The scorer: `rollouts` -> `groups`."""
